"""One source of numbers against another: predicted, dry run, measured and published.

Read in this order:
    memory.py             predicted memory against dry runs and measured trials
    step_time.py          predicted against measured step time
    published/            predictions against other people's measurements
    dry_run.py            predictions against dry runs of random setups
    rehearsal.py          predictions against rehearsals of random setups
    predictable.py        the model that predicts a trial: for Hugging Face's or a user's code a recording
    random_setups.py      draws the random setups
    random_architectures.py  random small models of the catalogue in Hugging Face's code
    compiled_setups.py    draws those whose blocks are compiled
    emulation.py          emulated trials against trials with all ranks
    results.py            all comparisons with one results folder
    calibration_match.py  whether a calibration applies to a trial
    matrix_rate.py        model FLOP/s of a trial against the machine's fastest matrix product
"""
