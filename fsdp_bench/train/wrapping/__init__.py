"""``fsdp()``: shard, replicate and checkpoint a module from a TrainSetup, with FSDP1, fully_shard or DDP."""
