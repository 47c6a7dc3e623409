"""Readers of a step's event log.

Read in this order:
    live_memory.py       live bytes: the peak of each phase and what it consists of
    caching_allocator/   reserved memory: CUDA's caching allocator, replayed
    schedule.py          when everything runs on which stream: step time, exposed communication
    streams.py           the host, the streams and the communicators of one rank, and how long work takes
    together.py          several ranks that wait for each other: pipeline stages and their bubbles
    step_parts.py        what a step's time consists of
    traffic.py           what rank 0 sends and receives
    host_memory.py       what CPU offload keeps in host memory
    compiled.py          streams.py and the allocator's rules as machine code, where they were compiled at installation
"""

from fsdp_bench.replay import compiled

compiled.load(__name__)
