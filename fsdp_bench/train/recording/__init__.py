"""Records a model's code once: what it allocates, saves for backward, frees and computes, on tensors without data.

Read in this order:
    main.py        ``python -m fsdp_bench.train.recording.main``: one recording; whose code, and at which points
    record.py      every variant, at as many points as its formulas need
    variant.py     one training step at one point
    forward.py     the forward pass: storages, nodes, saved tensors, calls of modules
    backward.py    the backward pass, node by node
    operators.py   what an operator works on
    formulas.py    recordings at several points into one, with formulas of the sizes
    loops.py       blocks that do the same are written down once
"""
