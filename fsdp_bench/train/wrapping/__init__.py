"""``fsdp()``: shards, replicates and checkpoints a module from a TrainSetup, with FSDP1, fully_shard or DDP.

Read in this order:
    wrap.py                      fsdp(), and which combinations it refuses
    units.py                     which modules become FSDP units; WrapPlan, by which the three wrappers wrap
    wrappers.py                  FullyShardedDataParallel, fully_shard and DistributedDataParallel
    activation_checkpointing.py  full and selective checkpointing of blocks
    readback.py                  reads strategy, units and dtypes back from a wrapped model
"""
