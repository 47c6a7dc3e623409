"""Running trials: how ranks are started, watched and ended, and how the outcome is decided.

Read in this order:
    remaining_trials.py   which trials of a sweep are recorded, and which are still to be run
    runner.py       runs one trial after another, from a scratch folder to a record
    time_limit.py   the trial's time limit (RunPlan.timeout_seconds in spec/record.py)
    outcome.py      decides a trial's outcome from its ranks' reports, exit codes and signals
    launchers.py    starts ranks with torchrun; the interface of all launchers
    fork_server.py  starts ranks by forking a process that has imported torch
    rehearsed.py    the GPU that rehearsed trials run on, and the environment that puts the stand-in before NVIDIA's
    processes.py    finds and kills processes that a trial left running
    logs.py         the ranks' log files, limited in size

train/processes/exception_to_outcome.py decides the outcome of one rank: CUDA out of memory, host memory, or a crash.
"""
