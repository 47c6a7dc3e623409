"""``python -m fsdp_bench.sweep.architectures [MODEL ...]``: record what the models of the catalogue run, for all sizes.

Writes catalog/recordings/. A model whose code a recording holds for already is left out; so, to record all anew, empty
the folder first. Needs torch and transformers; a recording takes half a minute.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fsdp_bench.catalog.architectures import FOLDER, NotRecorded, recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.errors import FsdpBenchError
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


def main() -> None:
    """Record what is missing, of all models of the catalogue or of those that are named."""
    for entry in models():
        if sys.argv[1:] and entry.name not in sys.argv[1:]:
            continue
        try:
            for path in record_missing(entry):
                print(f"{path.name}: {path.stat().st_size // 1024} KiB", flush=True)
        except FsdpBenchError as error:
            print(f"{entry.name}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
