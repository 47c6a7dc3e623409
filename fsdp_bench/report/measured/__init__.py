"""Measured trials on the terminal.

Read in this order:
    tables.py         one row for each trial: outcome, memory, throughput; a step's communication by kind of collective
    conclusion.py     the sentence above the table: least memory, fastest setting
    frontier_text.py  a frontier sweep: predicted and measured largest model of each cell
    progress_text.py  trials and searches while a sweep runs, in its list, and how far it is
"""
