"""Replaces functions of torch that one rank without a GPU cannot run, or that would take another path than in training.

Read in this order:
    process_group.py  torch.distributed for one rank without peers; scripts that spawn processes
    collectives.py    collectives that end at once
    integers.py       small integers of the GPU hold what they would hold in training
    host_memory.py    models in host memory that take none
    checkpoints.py    checkpoints without the bytes of their tensors
    random_weights.py  models without a checkpoint
    hub.py            configurations and tokenizers that are not on this machine
    random_examples.py  datasets that are not on this machine
"""
