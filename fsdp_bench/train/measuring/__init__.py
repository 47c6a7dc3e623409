"""Measuring a running trial: memory by phase, communication, time.

``meters.py`` reads memory by phase, on a CPU through ``storage_tracker.py``. ``communication.py`` profiles a step and
``collective_counter.py`` counts what it sends; ``fake_group.py`` and ``replaced_collectives.py`` run one without
communication. ``nvml.py`` samples power and utilization; ``stopwatch.py`` times single operations for a calibration.
"""
