"""The page of measured or rehearsed trials.

Read in this order:
    sweep.py     the page of one sweep, or of several
    trials.py    its trials as rows, points and bars
    frontier.py  the largest values that a sweep found, beside the predicted ones
    errors.py    predictions of trials beside what was measured
    one_step.py  one predicted step of a trial: memory over it, and what runs when
"""
