"""Measured trials as tables on the terminal.

Read in this order:
    tables.py               one row for each trial: outcome, memory, throughput
    conclusion.py           the sentence below the table: least memory, fastest setting
    communication_table.py  collectives of a step by kind, and exposed communication
    frontier_text.py        a frontier sweep: predicted and measured largest model of each cell
    matrix_rate.py          a trial's model FLOP/s beside the machine's fastest matrix product
    status_text.py          how far a sweep is
    progress_text.py        trials and searches while a sweep runs, and in its list
"""
