# The types of expandable_segments.py in C, for Cython.
cimport cython
from fsdp_bench.replay.caching_allocator.allocator cimport CachingAllocator
from fsdp_bench.replay.caching_allocator.blocks cimport Block, BlockPool

cdef long long _expandable_bytes(Block block)

cdef class ExpandableAllocator(CachingAllocator):
    cdef public list unmapped
    @cython.locals(blocks=list, expandable=cython.longlong, further=Py_ssize_t, next_expandable=cython.longlong)
    cpdef Py_ssize_t best(self, BlockPool free, Py_ssize_t at) except -1
