"""The charts of measured and rehearsed trials.

Read in this order:
    measured.py     draws peak memory, throughput and communication, one bar for each trial
    slides.py       chooses which trials are in one chart, their order, labels and conditions
    bars.py         one trial's bar, or the label in place of a missing bar
    trial_facts.py  a trial's settings and conditions, as charts name them
"""
