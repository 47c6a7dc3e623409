"""CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp), replayed on a step's event log.

Read in this order:
    replay.py                what a replay reads: peak reserved memory, allocation retries, out of memory
    program.py               the first steps as instructions for the allocator: allocations, frees, work, waits
    allocator.py             blocks, pools and segments: best fit, splitting and merging, frees that other streams defer
    expandable_segments.py   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
"""
