"""What a rehearsed script changed, by its overlays; without them, Python's functions protect the user's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import landlock, overlay
from .guard import Guard
from .places import ENTERED, Changes, is_below, protected_folders, temporary_folders


class Protection:
    """The protection of the user's files in a rehearsal."""

    def __init__(self, scratch: Path, words: Sequence[str]) -> None:
        """Continue what enter.py began.

        Must be called while the process has one thread.

        Args:
            scratch: the folder of the plan.
            words: the command, whose files are protected even in a temporary folder.
        """
        entered = scratch / ENTERED
        said = json.loads(entered.read_text()) if entered.exists() else {"overlays": []}  # a test's plan has no scratch
        self._overlays: list[overlay.Layers] | None = said.get("overlays")
        self._guard: Guard | None = None
        self._unseen = ""
        if self._overlays:
            overlay.rename_folders_by_copying()
        elif self._overlays is None:
            folders = protected_folders(words)
            self._guard = Guard(str(scratch), folders)
            refuses = landlock.refuse_writes_outside(self._guard.writable)
            is_temporary = any(is_below(folder, one) for folder in folders for one in temporary_folders())
            others = "refused" if refuses and not is_temporary else "written as usual"
            self._unseen = (
                f" That is so for files that Python writes; those that other programs write are {others},"
                f" because this machine allows no overlay ({said['error']})."
            )

    def seen(self, path: Any) -> Any:
        """Return the path that a library which does not open files by Python has to read."""
        return path if self._guard is None else self._guard.seen(path)

    def notes(self) -> list[str]:
        """Say what the script wrote and removed, if anything."""
        changes: Changes = self._guard.changes() if self._guard else overlay.changes(self._overlays or [])
        written, removed = changes.num_written, changes.num_removed
        if not (written or removed):
            return []
        what = f"The script wrote {written} file{'s' * (written != 1)} and removed {removed}"
        return [f"{what}: the disk is as it was.{self._unseen}"]
