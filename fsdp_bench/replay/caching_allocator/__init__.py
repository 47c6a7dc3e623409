"""CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp), replayed on a step's event log.

Read in this order:
    replay.py                what a replay reads: peak reserved memory, allocation retries, out of memory
    program.py               the first steps as instructions for the allocator: allocations, frees, work, waits
    allocator.py             best fit, splitting and merging, new segments, frees that other streams defer
    blocks.py                blocks, pools of free ones, sizes
    expandable_segments.py   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

The last three are machine code where they were compiled at installation (../compiled.py).
"""
