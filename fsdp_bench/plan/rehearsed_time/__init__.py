"""The time of a rehearsed script's step: what it issued, with the rates of its hardware.

Read in this order:
    answer.py          rehearsed_times(), the FLOPs and tokens of a step, and the JSON form
    events.py          from what was issued to the events that replay/schedule.py runs; links of process groups; what
                       Triton's kernels move
    operator_work.py   what an operator computes and moves
"""
