"""Records what the models of the catalogue run, for all sizes, into catalog/recordings/ (``make recordings``)."""

from __future__ import annotations

import re
from pathlib import Path

from fsdp_bench.catalog.architectures import FOLDER, NotRecorded, recorded_architecture
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.recording.recorded import RecordedCode
from fsdp_bench.spec.recording.request import RecordingSpec
from fsdp_bench.sweep.recording import record, write

SHORT, LONG = 32, 1 << 30
"""Sequence lengths within and beyond any sliding window."""


def record_missing(entry: ModelEntry, folder: Path = FOLDER) -> list[Path]:
    """Record what a model runs within and beyond its sliding window, where no recording holds; return the new files.

    Raises:
        MachineError: if torch or transformers is missing, or the code cannot be recorded; with the reason.
    """
    written = []
    for length in (SHORT, LONG):
        try:
            recorded_architecture(entry.hf_config(), length, entry.name, folder)
        except NotRecorded:
            code = record(RecordingSpec(config=entry.hf_config(), sequence_length=length, all_sizes=True))
            path = folder / file_name(entry, code)
            folder.mkdir(exist_ok=True)
            write(code, path)
            written.append(path)
    return written


def file_name(entry: ModelEntry, code: RecordedCode) -> str:
    """Return the name of a recording's file: the model_type, the model that it was recorded for, and the window."""
    assert code.architecture is not None
    parts = [entry.family, re.sub(r"[^A-Za-z0-9]+", "-", entry.name), code.architecture.side]
    return ".".join([part for part in parts if part] + ["json", "xz"])
