"""Measured trials on the terminal.

Read in this order:
    tables.py         one sentence, and a row for each trial: outcome, memory, throughput; communication by kind
    frontier_text.py  a frontier sweep: predicted and measured largest model of each cell
    progress_text.py  trials and searches while a sweep runs, in its list, and how far it is
"""
