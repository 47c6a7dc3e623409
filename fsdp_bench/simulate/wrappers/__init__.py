"""The work of each wrapper around a model: which parameters it gathers, frees and reduces, and when.

Functions have the names of the PyTorch functions that they follow.

    protocol.py            what a step asks of every wrapper
    units.py               which modules become FSDP units, and where weights lie in a flat parameter
    impossible.py          why a model cannot be trained under a setup, or is not predicted
    fsdp1.py               FullyShardedDataParallel: hooks, prefetching, the rate limiter of all-gathers
    flat_param_handle.py   one unit of it: its flat parameter, gathered and reduced
    fsdp2.py               fully_shard
    ddp.py                 the model alone, on one GPU; DistributedDataParallel: the same and its buckets
"""
