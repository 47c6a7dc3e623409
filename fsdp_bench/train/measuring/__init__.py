"""Memory, time and communication of a training step.

Read in this order:
    meters.py                peak memory by phase: the caching allocator's statistics on CUDA, live tensors on a CPU
    storage_tracker.py       live tensor bytes on a CPU
    communication.py         profiled steps: total and exposed communication time
    fake_group.py            steps without communication, with a process group that sends nothing
"""
