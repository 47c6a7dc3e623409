"""Readers of a step's event log.

``live_memory.py`` adds up live bytes, ``allocator.py`` replays CUDA's caching allocator, ``schedule.py`` says when
everything runs on which stream, ``traffic.py`` what is sent, ``host_memory.py`` what CPU offload keeps on the host.
"""
