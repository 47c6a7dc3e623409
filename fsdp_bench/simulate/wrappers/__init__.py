"""What each wrapper does around a model: which parameters it gathers, frees and reduces, and when.

``units.py`` says which modules become FSDP units. FSDP1 is ``fsdp1.py`` (its hooks), ``flat_param_handle.py`` (one
unit) and ``flat_layout.py`` (where weights lie in a unit); ``fsdp2.py`` is fully_shard; ``ddp.py`` is
DistributedDataParallel. Functions bear the names of the PyTorch functions that they stand for.
"""
