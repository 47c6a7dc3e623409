"""Runs one rank of a real, unmodified training command on a machine without GPUs, to find the memory it would take.

PyTorch's CUDA build runs on a stand-in for NVIDIA's libraries, which is preloaded into the command's process: memory is
addresses that are counted, kernels do nothing. Its C sources are in stand_in/. Imports no torch.

Read in this order:
    run.py          runs a command, and reads what its process reports
    command.py      reads the command: which interpreter, which launcher, and the words that follow it
    find_torch.py   the CUDA build of torch that an interpreter would import
    build.py        the stand-in, compiled once per torch, and the environment that puts it before NVIDIA's libraries
    enter.py        mounts overlays that keep the user's files as they are, and starts the user's Python in them
    inside/         runs in the user's interpreter: one rank of the script, observed
"""
