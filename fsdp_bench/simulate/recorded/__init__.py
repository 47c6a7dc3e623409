"""A recorded model on the tape: it runs what was recorded, under the same wrappers as the benchmark models.

Read in this order:
    bind.py           a recording for one number of blocks, batch size and sequence length: plain numbers
    references.py     which storage or node a reference of the recording means
    instructions.py   what runs: operators, modules, nodes of the graph
    model.py          the module tree and the forward pass
"""
