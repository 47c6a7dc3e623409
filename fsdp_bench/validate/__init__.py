"""Predictions against a user's own results, measured or rehearsed.

Read in this order:
    results.py      all comparisons with one results folder
    memory.py       predicted memory against that of trials; emulated trials against trials with all ranks
    step_time.py    predicted against measured step time
    predictable.py  the model that predicts a trial: for Hugging Face's or a user's code a recording
"""
