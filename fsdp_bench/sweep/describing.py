"""Asks a subprocess, which imports torch, what a model's code builds; keeps answers about Hugging Face's code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys

import msgspec

from fsdp_bench import __version__
from fsdp_bench.spec.codec import to_builtins, write_atomically
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.subprocesses.description import Description, DescriptionAnswer, DescriptionSpec
from fsdp_bench.sweep.machine import package_version, torch_version
from fsdp_bench.sweep.recording import cache_folder
from fsdp_bench.sweep.run.launchers import worker_environment


def describe(spec: DescriptionSpec) -> Description:
    """Return what a model's code builds. It is built without data, which takes seconds.

    Raises:
        MachineError: if torch or transformers is missing, or the code fails; one line.
    """
    if torch_version() is None:
        raise MachineError("a model that is given by its code needs torch: pip install 'fsdp-bench[train]'")
    path = cache_folder() / f"{_digest(spec)}.description.json"
    if spec.config is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=Description)
    found = _ask(spec)
    if spec.config is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(found))
    return found


def _ask(spec: DescriptionSpec) -> Description:
    command = [sys.executable, "-m", "fsdp_bench.train.models.describe", str(os.getpid())]
    data = msgspec.json.encode(to_builtins(spec))
    done = subprocess.run(command, input=data, capture_output=True, env=worker_environment())
    if not done.stdout:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise MachineError(f"its code ended the process that builds it: {lines[-1] if lines else 'no message'}")
    answer = msgspec.json.decode(done.stdout, type=DescriptionAnswer)
    if answer.description is None:
        raise MachineError(str(answer.error))
    return answer.description


def _digest(spec: DescriptionSpec) -> str:
    versions = [__version__, *map(package_version, ("torch", "transformers"))]
    return hashlib.sha256(msgspec.json.encode([to_builtins(spec), versions], order="sorted")).hexdigest()[:24]
