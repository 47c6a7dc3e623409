"""The time that work takes, and the memory of communicators. No simulation.

Read in this order:
    hardware.py       which rates a GPU has: a calibration's or a datasheet's
    datasheet.py      rates from a GPU's datasheet
    attention.py      how long attention takes
    slowest_gpu.py    how much slower the slowest GPU is, for which all wait
    calibrated.py     rates that were measured on a machine
    collectives.py    time of collectives: NCCL's cost model on the links of a server
    channels.py       how many multiprocessors a collective occupies
    communicators.py  GPU memory that NCCL takes outside of PyTorch's allocator
    nccl_buffers.py   NCCL's rings, channels and buffers
"""
