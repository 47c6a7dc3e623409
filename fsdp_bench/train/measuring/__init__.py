"""Memory, time and communication of a training step.

Read in this order:
    meters.py                peak memory by phase: the caching allocator's statistics on CUDA, live tensors on a CPU
    storage_tracker.py       live tensor bytes on a CPU
    communication.py         profiled steps: total and exposed communication time
    collective_counter.py    number and bytes of a step's collectives
    fake_group.py            steps without communication, with a process group that sends nothing
    replaced_collectives.py  replaces torch's collectives for such a group, and for ranks that share a GPU
    nvml.py                  power, utilization and memory of the GPU
    stopwatch.py             times single operations for a calibration
"""
