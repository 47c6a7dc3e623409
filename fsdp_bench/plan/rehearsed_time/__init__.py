"""The time of a rehearsed script's step: what it issued, with the rates of its hardware.

Read in this order:
    answer.py          rehearsed_time(), and its JSON form
    events.py          from what was issued to the events that replay/schedule.py runs
    operator_work.py   what an operator computes and moves
    kernel_work.py     what a kernel of Triton moves
    process_groups.py  which links a process group has
    flops.py           FLOPs and tokens of the step
"""
