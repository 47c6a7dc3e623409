"""Times single operators, copies and collectives on this machine.

Read in this order:
    calibrator.py        one rank that measures everything; collectives, and the memory of a CUDA context
    operator_times.py    matrix products, attention, memory-bound operators, copies, optimizers
"""
