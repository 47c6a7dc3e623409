# The types of blocks.py in C, for Cython.
cimport cython

cpdef long long segment_bytes(long long size)
cpdef long long page_bytes(int pool)

@cython.freelist(512)
cdef class Block:
    cdef public long long address, size
    cdef public int pool, num_events
    cdef public bint is_free, is_unmapped
    cdef public Block before, after
    cdef public set used_by
    @cython.locals(rest=Block)
    cpdef Block cut(self, long long size)
    cpdef absorb(self, Block after)

cdef class BlockPool:
    cdef public list blocks, orders
    @cython.locals(low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t, block=Block)
    cpdef Py_ssize_t first(self, long long size, long long address=*)
    @cython.locals(at=Py_ssize_t)
    cpdef insert(self, Block block)
    cpdef Block take(self, Py_ssize_t at)
    cpdef remove(self, Block block)
