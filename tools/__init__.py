"""Developers' tools, which are not installed. The package never imports it.

Read in this order:
    outputs.py     records what commands print, to compare it after a change
    validate/      predictions against drawn setups and published measurements
    recordings.py  ``make recordings``: what the models of the catalogue run
    all_sizes.py   records a model's code for all sizes of its architecture, with torch
    real_tensors.py  dry runs on real tensors, with torch
    drawn_script.py  trains what validate/observer.py draws, with torch
    show_recording.py  prints a recording as a person reads it
    frameworks/    examples of other frameworks, rehearsed as they are
    compiled/      records what torch.compile makes of a block, with torch's CUDA build
    budgets.py     ``make budgets``: how long commands take
    wheel.py       ``make wheel``: a built wheel in an empty environment
"""
