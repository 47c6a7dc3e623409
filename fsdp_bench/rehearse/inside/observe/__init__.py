"""Observes the script without changing what it does.

Read in this order:
    steps.py       the step and the phase that run; ends the script after enough steps
    memory.py      peaks of the caching allocator between two moments
    history.py     the lines that hold memory at the peak, and memory over time
    reads.py       values that the script reads from the GPU
    progress.py    a line every half minute
    user_lines.py  which line of Python something is attributed to
"""
