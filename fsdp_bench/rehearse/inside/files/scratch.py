"""A scratch folder with the paths of the disk, which a script sees in place of the disk's.

Files that the script writes go there, and are found there first when it reads. Files that it removes stay on the disk;
a log, which forked processes share, hides them. Links are followed here, as the kernel would, so that none in the
scratch folder leads to the disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from stat import S_ISDIR
from typing import Any, NoReturn

from .places import Changes, is_below, num_files, temporary_folders

_MOST_LINKS = 40
"""MAXSYMLINKS of Linux."""


class ScratchFiles:
    """Where files are read and written. A *place* is a path of the disk without links, whether or not it is there."""

    def __init__(self, scratch: str, folders: Sequence[str]) -> None:
        scratch = os.path.realpath(scratch)
        self._root, self._log = f"{scratch}/files", f"{scratch}/removed"
        os.mkdir(self._root)
        with open(self._log, "xb"):
            pass
        temporary = [one for one in temporary_folders() if not any(is_below(folder, one) for folder in folders)]
        self.writable = (*temporary, scratch, "/dev", "/proc")
        """Folders in which files are changed on the disk: no temporary one in which the script's own are."""
        if not any(is_below(os.path.realpath(tempfile.gettempdir()), one) for one in temporary):
            os.mkdir(f"{scratch}/tmp")
            os.environ["TMPDIR"] = tempfile.tempdir = f"{scratch}/tmp"
        self._scratch, self._folders = scratch, folders
        self._removed: set[str] = set()
        """Places that are no longer seen, nor what is below them: those of the log that were read."""
        self._log_size = 0
        self._walks: dict[str, str] = {}
        """Folders, and the same without links; until the log grows, which says of new links, too."""

    def _changes(self) -> Changes:
        written = sum(len(files) for folder, _, files in os.walk(self._root) if not folder.endswith("__pycache__"))
        outermost = [one for one in self._removed if not self._is_removed(os.path.dirname(one))]
        return written, sum(map(num_files, outermost))

    def _place(
        self, path: Any, folder: int | None = None, follows: bool = True, moves: bool = False
    ) -> tuple[str | None, Any]:
        """Return the path on the disk of what a function is given; or None if it is to work there, and with which path.

        ``moves``: what is below the path counts, too.
        """
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None, path
        text = os.fsdecode(path)
        if not os.path.isabs(text):
            text = f"{os.getcwd() if folder is None else os.readlink(f'/proc/self/fd/{folder}')}/{text}"
        if text.startswith(("/proc/", "/dev/")) and not text.startswith("/dev/shm/"):
            return None, path
        place = self._followed(text, follows)
        is_guarded = any(is_below(place, one) or (moves and is_below(one, place)) for one in self._folders)
        if is_below(place, self._scratch) or (not is_guarded and any(is_below(place, one) for one in self.writable)):
            return None, path if place == text else place
        return place, path

    def _opened(self, descriptor: int) -> str | None:
        """Return the path on the disk of what is open, or None if it is to be changed there."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return self._place(path)[0] if path.startswith("/") else None

    def _followed(self, path: str, follows: bool) -> str:
        """Return an absolute path without links, also those that the script made or removed."""
        if is_below(path, self._root):
            path = path[len(self._root) :]
        folder, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            return self._walked(path, follows)
        if (parent := self._walks.get(folder)) is None:
            parent = self._walks[folder] = self._walked(folder, True).rstrip("/")
        place = f"{parent}/{name}"
        return self._walked(place, True) if follows and os.path.islink(self._seen(place)) else place

    def _walked(self, path: str, follows: bool) -> str:
        names, place, num_links = _names_of(path), "", 0
        while names:
            name = names.pop()
            if name == "..":
                place = os.path.dirname(place).rstrip("/")
                continue
            place = f"{place}/{name}"
            if not (names or follows):
                break
            try:
                target = os.readlink(self._seen(place))
            except OSError:
                continue
            if (num_links := num_links + 1) > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            place = "" if target.startswith("/") else os.path.dirname(place).rstrip("/")
            names += _names_of(target)
        return place or "/"

    def _written(self, place: str) -> str:
        return self._root + place

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, (str, bytes)) and is_below(os.fsdecode(path), self._root)

    def _read_log(self) -> None:
        """See what was removed, also by processes that this one forked or is forked from."""
        size = os.stat(self._log).st_size
        if size > self._log_size:
            with open(self._log, "rb") as log:
                log.seek(self._log_size)
                self._removed |= {os.fsdecode(one) for one in log.read(size - self._log_size).split(b"\0") if one}
            self._log_size = size
            self._walks.clear()

    def _is_removed(self, place: str) -> bool:
        while self._removed and place != "/":
            if place in self._removed:
                return True
            place = os.path.dirname(place)
        return False

    def _seen(self, place: str) -> str:
        """Return where a file or folder is read: a removed one where there is nothing."""
        written = self._written(place)
        return written if os.path.lexists(written) or self._is_removed(place) else place

    def _status(self, place: str) -> os.stat_result | None:
        """Return the status of what the script sees at a path, a link's own."""
        try:
            return os.lstat(self._seen(place))
        except OSError:
            return None

    def _is_folder(self, place: str) -> bool:
        found = self._status(place)
        return found is not None and S_ISDIR(found.st_mode)

    def _require(self, place: str, path: Any) -> None:
        if self._status(place) is None:
            fail(errno.ENOENT, path)

    def _to_read(self, path: Any, folder: int | None = None, follows: bool = True) -> Any:
        """Return the path to read: the given one, for the sake of messages, if nothing was ever there."""
        place, given = self._place(path, folder, follows)
        if place is None:
            return given
        seen = self._seen(place)
        return path if seen == place and folder is None and not os.path.lexists(place) else seen

    def _to_load(self, path: Any) -> Any:
        """Return the path of a library: a link is kept, which says where those are that it needs."""
        place, given = self._place(path)
        if place is None:
            return given
        seen = self._seen(place)
        return path if seen == place and os.path.exists(path) else seen

    def _to_write(self, place: str, keeps: bool, path: Any) -> str:
        """Return where a file is written; with what it holds, if that is to be kept."""
        written = self._written(place)
        if not os.path.lexists(written):
            self._make_parents(place, path)
            if keeps and not self._is_removed(place) and os.path.isfile(place):
                shutil.copy2(place, written)
        return written

    def _make_parents(self, place: str, path: Any) -> None:
        parent = os.path.dirname(place)
        if not self._is_folder(parent):
            fail(errno.ENOENT if self._status(parent) is None else errno.ENOTDIR, path)
        os.makedirs(self._written(parent), exist_ok=True)

    def _names(self, place: str) -> list[str]:
        written = self._written(place)
        names = set(os.listdir(written)) if os.path.isdir(written) else set()
        if not self._is_removed(place) and os.path.isdir(place):
            names |= {name for name in os.listdir(place) if not self._is_removed(os.path.join(place, name))}
        return sorted(names)

    def _discard(self, place: str) -> None:
        written = self._written(place)
        self._walks.clear()
        if os.path.isdir(written) and not os.path.islink(written):
            shutil.rmtree(written)
        elif os.path.lexists(written):
            os.remove(written)
        if os.path.lexists(place) and not self._is_removed(place):
            self._note(place)

    def _note(self, removed: str) -> None:
        """Add to the log; an empty path says that there is a new link."""
        with open(self._log, "ab", buffering=0) as log:
            log.write(os.fsencode(removed) + b"\0")
        self._read_log()

    def _copy(self, place: str, target: str) -> None:
        seen = self._seen(place)
        if os.path.isdir(seen) and not os.path.islink(seen):
            os.makedirs(target, exist_ok=True)
            for name in self._names(place):
                self._copy(os.path.join(place, name), os.path.join(target, name))
        else:
            shutil.copy2(seen, target, follow_symlinks=False)


def _names_of(path: str) -> list[str]:
    """Return the names of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def fail(number: int, path: Any) -> NoReturn:
    """Raise what Python's functions raise for an error number."""
    raise OSError(number, os.strerror(number), path)
