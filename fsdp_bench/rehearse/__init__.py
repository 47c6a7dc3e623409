"""Runs one rank of a real, unmodified training command on a machine without GPUs, to find the memory it would take.

PyTorch's CUDA build runs on a stand-in for NVIDIA's libraries, which is preloaded into the command's process: memory is
addresses that are counted, kernels do nothing. Its C sources are in stand_in/. Imports no torch.

Read in this order:
    run.py          runs a command, and reads what its process reports
    command.py      reads the command: which interpreter, which launcher, and the words that follow it
    find_torch.py   the CUDA build of torch that an interpreter would import
    build.py        the stand-in, compiled once per torch, and the environment that puts it before NVIDIA's libraries
    enter.py        mounts overlays that keep the user's files as they are, and starts the user's Python in them
    prepared.py     a process that has loaded torch, forked for each rehearsal of a question
    inside/         runs in the user's interpreter: one rank of the script, observed

The function ``fsdp_bench.rehearse()`` has this package's name, so the package itself can be called.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that can be called: the public function and the package have the same name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Rehearse a command: see ``fsdp_bench.plan.script.each.rehearse``."""
        import fsdp_bench

        return fsdp_bench.__getattr__("rehearse")(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
