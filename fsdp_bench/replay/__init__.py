"""Readers of a step's event log.

``live_memory.py`` adds up live bytes, ``schedule.py`` says when everything runs on which stream, ``traffic.py`` what is
sent, ``host_memory.py`` what CPU offload keeps on the host. CUDA's caching allocator:

    program.py    what it goes through: allocations, frees and waits of the first steps, with names for tensors
    allocator.py  a replay and what it reads: reserved, retries
    malloc.py     malloc and free: which block a tensor gets, frees that other streams defer
    segments.py   when a block is cut, merged, and a segment is asked of the GPU; settings
    heap.py       where all of this is kept: one array of integers, so that
    compiled.py   numba can compile it
"""
