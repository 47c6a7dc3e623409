"""Real FSDP code as rank 0 of N, on tensors without data.

Read in this order:
    main.py           runs one setup after another
    fake_world.py     makes this process one rank of N: fake process group, fake tensors
    fake_gpu.py       an accelerator without kernels
    fused_kernels.py  what CUDA's fused attention and RMSNorm kernels allocate and save; CUDA's autocast
    fake_tracker.py   live bytes of fake tensors; those at the peak by category
    workarounds.py    the symbols of torch that are replaced because tensors have no data, and why
"""
