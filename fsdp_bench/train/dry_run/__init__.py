"""Real FSDP code as rank 0 of N on tensors without data.

``main.py`` answers setup after setup; ``fake_world.py`` is the world of ranks that do not exist, ``fake_gpu.py`` the
accelerator that does not; ``fake_tracker.py`` and ``breakdown.py`` read live bytes; ``workarounds.py`` holds every
place where torch has to be told that tensors have no data.
"""
