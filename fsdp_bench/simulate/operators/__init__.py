"""What each operator allocates, saves for backward, frees and computes, by its name in PyTorch.

``core.py`` holds the operators that models share; attention, losses, optimizers, clipping and the gradient scaler have
a file each. ``kernels.py`` says which implementation of an operator runs, ``workspaces.py`` and ``batched_copies.py``
what CUDA's allocate inside of themselves.
"""
