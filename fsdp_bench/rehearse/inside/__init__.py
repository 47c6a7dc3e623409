"""Runs in the user's interpreter: Python 3.10 or newer with torch, and none of fsdp-bench's dependencies.

Nothing here imports fsdp_bench. The files import each other as siblings.

Read in this order:
    main.py        runs the script as one rank, and reports what it did
    launch.py      what a command would start, and the environment that torchrun or accelerate would give to a rank
    forks.py       runs the script in forks of a process that has loaded torch
    at_import.py   changes a module when the script imports it
    files/         keeps the user's files as they are
    observe/       what the script does: steps, peaks, lines that hold memory, values that it reads
    replace/       what would need other ranks, a GPU's values, host memory or a disk
"""
