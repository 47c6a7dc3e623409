"""CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp), replayed on a step's event log.

Read in this order:
    replay.py                what a replay reads: peak reserved memory, allocation retries, out of memory
    program.py               the first steps as instructions for the allocator: allocations, frees, waits
    execution.py             executes them
    malloc.py                allocate, free, and frees that other streams defer (record_stream)
    split_and_merge.py       free blocks: which is taken (best fit), when a block is split, how neighbours are merged
    segments.py              segments from cudaMalloc, and their release
    expandable_segments.py   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    sizes.py                 rounding, sizes of segments and pages
    heap.py                  all of this state, in one array of integers, so that
    compiled.py              numba can compile it
"""
