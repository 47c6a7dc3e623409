"""Records what the models of the catalogue run, for all sizes, into catalog/recordings/ (``make recordings``)."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp_bench.catalog.architectures import FOLDERS, NotRecorded, recorded_architecture
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.recording.request import RecordingSpec
from fsdp_bench.spec.subprocesses.dry_run import ModelCode
from fsdp_bench.sweep.recording import record, write

SHORT, LONG = 32, 1 << 30
"""Sequence lengths within and beyond any sliding window."""


def record_missing(entry: ModelEntry, code_of: ModelCode = "huggingface", folder: Path | None = None) -> list[Path]:
    """Record what a model runs within and beyond its sliding window, where no recording holds; return the new files.

    Args:
        entry: a model of the catalogue.
        code_of: whose code.
        folder: where to look and write; by default what comes with fsdp-bench.

    Raises:
        MachineError: if torch, transformers or torchtitan is missing, or the code cannot be recorded; with the reason.
    """
    folder = folder or FOLDERS[code_of]
    written = []
    for length in (SHORT, LONG):
        try:
            recorded_architecture(entry.hf_config(), length, entry.name, folder)
        except NotRecorded:
            spec = RecordingSpec(
                config=entry.hf_config(),
                sequence_length=length,
                all_sizes=True,
                code=code_of,
                activation_offload=True,
            )
            code = record(spec)
            path = folder / file_name(entry, code)
            folder.mkdir(parents=True, exist_ok=True)
            write(code, path)
            written.append(path)
    return written


def file_name(entry: ModelEntry, code: RecordedCode) -> str:
    """Return the name of a recording's file: the model_type, the model that it was recorded for, and the window."""
    assert code.architecture is not None
    parts = [entry.family, re.sub(r"[^A-Za-z0-9]+", "-", entry.name), code.architecture.side]
    return ".".join([part for part in parts if part] + ["json", "xz"])
