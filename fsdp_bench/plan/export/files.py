"""File: one exported file. write() puts files into a folder and loses nothing that is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_bench.spec.errors import SpecError


@dataclass(frozen=True)
class File:
    """One file of an export."""

    kind: str
    name: str
    text: str
    start: str | None = None
    """The command that starts it, or None if another file of the export does."""
    notes: tuple[str, ...] = ()
    """The settings that the file cannot express, or that differ from the setting that was asked for."""


def write(files: Sequence[File], folder: Path) -> list[Path]:
    """Write files into a folder, which is made if it is not there; return their paths.

    Raises:
        SpecError: if a file is there already and differs, or cannot be written. Then no file is written.
    """
    paths = [folder / file.name for file in files]
    for file, path in zip(files, paths, strict=True):
        if path.is_symlink() or path.exists():
            _refuse_other(path, file.text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, path in zip(files, paths, strict=True):
            if not path.exists():
                with path.open("x", encoding="utf-8") as stream:
                    stream.write(file.text)
    except OSError as error:
        raise SpecError(f"export-dir: {str(folder)!r} cannot be written: {error.strerror or error}") from None
    return paths


def _refuse_other(path: Path, text: str) -> None:
    try:
        is_same = path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        is_same = False
    if not is_same:
        raise SpecError(
            f"export: {str(path)!r} exists and differs, so nothing was written; move it, or name another --export-dir"
        )
