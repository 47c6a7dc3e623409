"""Running trials: how ranks are watched and ended, and how the outcome is decided.

Read in this order:
    runner.py       runs one trial after another, from a scratch folder to a record
    outcome.py      decides a trial's outcome from its ranks' reports, exit codes and signals
    rehearsed.py    the GPU that rehearsed trials run on, and the environment that puts the stand-in before NVIDIA's

train/processes/rank.py decides the outcome of one rank: CUDA out of memory, host memory, or a crash.
"""
