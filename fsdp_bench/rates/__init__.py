"""The time that work takes, and the memory of communicators. No simulation.

Read in this order:
    datasheet.py      rates from a GPU's datasheet
    power.py          matrix products under a power limit
    attention_time.py how long attention takes
    calibrated.py     rates that were measured on a machine; which rates hardware has
    scaled.py         a datasheet's rates, scaled by a run of the user's own
    collectives.py    time of collectives: NCCL's cost model on the links of a server
    communicators.py  NCCL's channels, and the GPU memory that it takes outside of PyTorch's allocator
    nccl_buffers.py   NCCL's rings, channels and buffers
"""
