"""The files of an exported setting as text: which were written, how to start them, what they do not express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_bench.report.text.common import fact


def exports_text(written: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Return the files of plan.export.document as lines; commands are started in their ``folder``."""
    where = "the current folder" if str(folder) == "." else str(folder)
    names = ", ".join(Path(file["path"]).name for file in written)
    lines = ["", fact("exported", f"{names} into {where}, where they are started")]
    lines += [fact("start", command) for command in dict.fromkeys(file["start"] for file in written) if command]
    notes = dict.fromkeys(note for file in written for note in file["notes"])
    return "\n".join([*lines, *(fact("note", note) for note in notes)])
