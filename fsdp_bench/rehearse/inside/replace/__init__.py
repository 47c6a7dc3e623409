"""Replaces functions of torch that one rank without a GPU cannot run, or that would take another path than in training.

Read in this order:
    process_group.py  torch.distributed for one rank without peers
    collectives.py    collectives that end at once
    spawn.py          scripts that start their own processes: one of them runs
    integers.py       small integers of the GPU hold what they would hold in training
    host_memory.py    models in host memory that take none
    weights.py        models of Hugging Face from their configuration alone
    checkpoints.py    checkpoints without the bytes of their tensors
"""
