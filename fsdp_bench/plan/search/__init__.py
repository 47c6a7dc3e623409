"""The largest model, batch size or sequence length that fits, and the fewest GPUs.

Read in this order:
    quantity.py  the quantity that is searched, and its candidates
    fit.py       decides whether a candidate fits, and which memory it exceeds
    search.py    finds the largest candidate that fits
"""
