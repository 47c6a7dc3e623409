# The types of streams.py in C, for Cython.
cimport cython

cdef int _RUN, _OPERATORS, _COLLECTIVE, _START, _RECORD, _WAIT, _WAIT_FOR_STARTED

cdef class EventMark:
    cdef public object time

cdef class OperatorRun:
    cdef public list works

@cython.freelist(512)
cdef class Ran:
    cdef public object event, work
    cdef public double seconds, begin, end

@cython.freelist(512)
cdef class Item:
    cdef public int step, count, number
    cdef public double issued
    cdef public EventMark mark
    cdef public OperatorRun operators
    cdef public Ran ran

cdef class Streams:
    cdef public object rates, _end_of_collective
    cdef public list waits, ran, _queues, _free, _beside
    cdef public dict _alone, _with_collectives, _rests, _marks, _issued, _done, _group_free, _pending, _started_ends
    cdef public double _host
    cdef public EventMark _host_waits
    cdef public int _num_started
    @cython.locals(going=cython.bint)
    cpdef bint advance(self, object log) except -1
    cpdef double _seconds(self, object kind, object work) except? -1
    cpdef double _seconds_beside(self, object work, tuple collectives) except? -1
    @cython.locals(issued=cython.bint, item=Item)
    cpdef bint _issue(self, object log) except -1
    @cython.locals(ran=Ran, item=Item)
    cpdef _issue_work(self, object event, object work)
    @cython.locals(mark=EventMark, item=Item, stream=cython.int)
    cpdef _order(self, object event)
    @cython.locals(mark=EventMark)
    cpdef EventMark _mark(self, int stream)
    @cython.locals(item=Item, moved=cython.bint)
    cpdef bint _advance(self, int stream) except -1
    @cython.locals(ready=cython.double, end=cython.double)
    cpdef bint _pass(self, Item item, int stream) except -1
    cpdef bint _collect(self, Ran ran, double ready, object stream) except -1
    cpdef _wait_for_ranks(self, object stream, double begin, double end)
    @cython.locals(item=Item, moved=cython.bint)
    cpdef bint _start_pending(self, str group) except -1
    @cython.locals(item=Item, moved=cython.bint)
    cpdef bint run_operators(self) except -1
    @cython.locals(end=cython.double, launch=cython.double, all_issued=cython.double, begin=cython.double,
                   last=cython.double, change=cython.double, index=Py_ssize_t, ahead=Py_ssize_t, rests=list, one=Ran)
    cpdef double _end_of(self, OperatorRun operators, double issued) except? -1
    @cython.locals(seconds=cython.double, from_issue=cython.double, rests=list)
    cpdef list _rests_of(self, OperatorRun operators, tuple beside)
    @cython.locals(now=cython.double, left=cython.double, alone=cython.double, seconds=cython.double,
                   change=cython.double)
    cpdef double _end_beside(self, object work, double begin) except? -1
