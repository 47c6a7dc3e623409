"""Asks a subprocess, which imports torch, what models' code builds; keeps answers about Hugging Face's code."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fsdp_bench import __version__
from fsdp_bench.plan.recording import kept_folder
from fsdp_bench.spec.codec import to_builtins, write_atomically
from fsdp_bench.spec.errors import MachineError, install_hint
from fsdp_bench.spec.subprocesses.description import Description, DescriptionAnswer, DescriptionSpec
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.sweep.launchers.start import worker_environment
from fsdp_bench.sweep.machine import package_version, torch_version


def describe(specs: Sequence[DescriptionSpec]) -> list[DescriptionAnswer]:
    """Return what each model's code builds, or why it builds nothing. They are built without data, which takes seconds.

    Raises:
        MachineError: if torch is missing, or the code ends the process.
    """
    if specs and torch_version() is None:
        raise MachineError(f"a model that is given by its code needs torch: {install_hint('train')}")
    found = {index: known for index, spec in enumerate(specs) if (known := _kept(spec)) is not None}
    missing = [index for index in range(len(specs)) if index not in found]
    if missing:
        for index, answer in zip(missing, _ask([specs[index] for index in missing]), strict=True):
            found[index] = answer
            _keep(specs[index], answer)
    return [found[index] for index in range(len(specs))]


def _ask(specs: list[DescriptionSpec]) -> list[DescriptionAnswer]:
    command = own_python("fsdp_bench.train.models.describe", str(os.getpid()))
    data = msgspec.json.encode(to_builtins(specs))
    done = subprocess.run(command, input=data, capture_output=True, env=worker_environment())
    if not done.stdout:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise MachineError(f"models: their code ended the process that builds them: {(lines or ['no message'])[-1]}")
    return msgspec.json.decode(done.stdout, type=list[DescriptionAnswer])


def _kept(spec: DescriptionSpec) -> DescriptionAnswer | None:
    """Return the answer of an earlier process; None for a user's code, which may have changed."""
    path = _path(spec)
    if path is not None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return DescriptionAnswer(description=msgspec.json.decode(path.read_bytes(), type=Description))
    return None


def _keep(spec: DescriptionSpec, answer: DescriptionAnswer) -> None:
    path = _path(spec)
    if path is not None and answer.description is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(answer.description))


def _path(spec: DescriptionSpec) -> Path | None:
    folder = kept_folder()
    return folder and folder / f"{_digest(spec)}.description.json" if spec.config is not None else None


def _digest(spec: DescriptionSpec) -> str:
    versions = [__version__, *map(package_version, ("torch", "transformers"))]
    return hashlib.sha256(msgspec.json.encode([to_builtins(spec), versions], order="sorted")).hexdigest()[:24]
