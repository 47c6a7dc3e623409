"""Real FSDP code as rank 0 of N on tensors without data.

``main.py`` runs one setup after another. ``fake_world.py`` makes this process one rank of a world, ``fake_gpu.py`` is
an accelerator without kernels; ``fused_kernels.py`` and ``cuda_autocast.py`` stand for CUDA's kernels and autocast.
``fake_tracker.py`` and ``breakdown.py`` measure live bytes. ``workarounds.py`` lists what is replaced in torch because
tensors have no data, and ``replacements.py`` what replaces it.
"""
