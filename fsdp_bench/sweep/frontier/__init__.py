"""The measured largest model: each cell of a sweep with [frontier] is searched with real trials.

Read in this order:
    file.py      [frontier]: which quantity is searched, between which values
    cell.py      one cell: its prediction, its trials, its answer; the record of all cells
"""
