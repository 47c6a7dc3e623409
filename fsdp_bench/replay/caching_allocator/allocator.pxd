# The types of allocator.py in C, for Cython.
cimport cython
from fsdp_bench.replay.caching_allocator.blocks cimport Block, BlockPool

cdef class CachingAllocator:
    cdef public object gpu_bytes
    cdef public dict blocks
    cdef public list pools, deferred, events
    cdef public long long next_address, allocated, peak_allocated, deferred_bytes, peak_active, reserved, peak_reserved
    cdef public long long largest_kept_rest, num_retries, retried_bytes, num_recorded, num_completed, num_launched, next_deferred
    cdef public object launched
    @cython.locals(free=BlockPool, found=Block, at=Py_ssize_t, allocated=cython.longlong)
    cpdef bint allocate(self, object tensor, long long size, int pool) except -1
    @cython.locals(block=Block)
    cpdef free(self, object tensor)
    @cython.locals(block=Block)
    cpdef record_stream(self, object tensor, int stream)
    cpdef launch(self, long long count)
    cpdef long long record_event(self)
    @cython.locals(block=Block, event=cython.longlong)
    cpdef process_events(self)
    cpdef release_cached_blocks(self)
    @cython.locals(free=BlockPool, before=Block, after=Block)
    cpdef Block insert_free(self, Block block)
    cpdef bint reserve(self, long long num_bytes) except -1
    @cython.locals(address=cython.longlong)
    cpdef Block new_segment(self, long long num_bytes, long long alignment, int pool)
    @cython.locals(block=Block, rest=cython.longlong)
    cpdef Block take(self, BlockPool free, Py_ssize_t at, long long size)
    cpdef Py_ssize_t best(self, BlockPool free, Py_ssize_t at) except -1
    cpdef Block new_block(self, int pool, long long size)
    cpdef release_blocks(self, BlockPool free)

@cython.locals(number=cython.longlong, second=cython.longlong)
cpdef execute(CachingAllocator allocator, list instructions, long long layers_skipped)
