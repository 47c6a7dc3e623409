"""The pages of what is predicted, from the JSON documents of plan, predict and max-size.

Read in this order:
    plan.py        the page of a plan
    offers.py      its offers: a table, price against days, how far predictions may be off
    settings.py    what setups are and what they differ in: titles, cells, names
    prediction.py  the page of predicted setups
    max_size.py    the page of the largest that fits
"""
