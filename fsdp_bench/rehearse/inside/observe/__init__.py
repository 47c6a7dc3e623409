"""Observes the script without changing what it does.

Read in this order:
    steps.py       the step and the phase that run; ends the script after enough steps
    memory.py      peaks of the caching allocator between two moments; the lines that hold memory; memory over time
    reads.py       values that the script reads from the GPU
    issued.py      what one step issues, where somebody asked for its time: operators, kernels, collectives, copies
    trace.py       what the stand-in notes of that: streams, events, what the host waits for; both in one order
    arguments.py   an operator's arguments and results
    hooks.py       what is no operator: kernels of Triton, hooks of FSDP, recomputation
    side_effects.py  what observing would change in torch, undone
    imports.py     modules of installed packages that the script has imported
    user_lines.py  which line of Python something is attributed to
"""
