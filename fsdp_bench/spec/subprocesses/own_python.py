"""The command that starts a module of this package in this Python, and its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def own_python(module: str, *arguments: str) -> list[str]:
    """Return the command for ``python -m module``, which finds no module in the current folder.

    A file such as random.py lies there by chance, or was put there; -P keeps it off Python's path.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment(beside: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of such a process: it starts no threads on import, and no CUDA.

    ``beside`` are further variables, over those of this process.
    """
    environment = {**os.environ, **beside}
    environment["PYTHONSAFEPATH"] = "1"  # python -m would import whatever lies in the current folder
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy starts its threads on import
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment.setdefault("KINETO_LOG_LEVEL", "5")
    # torch.cuda.is_available() then asks NVML and does not start CUDA, which no forked process could use.
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
