"""How long work takes and what communicators need: datasheets, calibrations, NCCL's own models. No simulation.

``datasheet.py`` answers from a GPU's datasheet, ``calibrated.py`` from a machine's calibration; ``collectives.py`` is
NCCL's model of time on the links of a server; ``communicators.py`` and ``nccl_buffers.py`` are the memory that NCCL
takes outside of PyTorch's allocator.
"""
