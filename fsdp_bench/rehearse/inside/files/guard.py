"""Python's own functions, replaced so that what a script writes, renames or removes changes a scratch folder alone.

The scratch folder has the paths of the disk: what is written is there, and is preferred by what reads; what was removed
is not seen. Processes that are forked from this one do the same.

Not covered: files that C++, Rust or another program writes by itself; landlock.py has the kernel refuse those.
"""

from __future__ import annotations

import _io
import builtins
import errno
import io
import os
import pathlib
import posix
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from threading import local
from typing import Any

from .places import Changes, is_below, num_files, temporary_folders

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """The replaced functions, and what was written and removed by them."""

    def __init__(self, scratch: str, folders: Sequence[str]) -> None:
        """Replace them. ``folders``, which are real paths, are guarded even in a temporary folder."""
        scratch = os.path.realpath(scratch)
        self._root = f"{scratch}/files"
        os.mkdir(self._root)
        self.writable = (*temporary_folders(), scratch, "/dev", "/proc")
        """Folders in which files are changed on the disk."""
        self._scratch, self._folders = scratch, folders
        self._removed: set[str] = set()
        """Paths of the disk that are no longer seen, nor what is below them."""
        self._thread = local()
        self._replace_all()

    def changes(self) -> Changes:
        """Count the files that are not on the disk, without Python's caches, and those that the script removed."""
        self._thread.is_inside = True
        written = sum(len(files) for folder, _, files in os.walk(self._root) if not folder.endswith("__pycache__"))
        outermost = [one for one in self._removed if not any(is_below(one, top) for top in self._removed - {one})]
        removed = sum(map(num_files, outermost))
        self._thread.is_inside = False
        return Changes(written, removed)

    def seen(self, path: Any) -> Any:
        """Return the path that a library which does not open files by Python has to read."""
        self._thread.is_inside = True
        place = self._place(path)
        found = path if place is None else self._where(place, path)
        self._thread.is_inside = False
        return found

    def _replace_all(self) -> None:
        for module, name in ((builtins, "open"), (io, "open")):
            self._replace(module, name, self._open)
        self._replace(_io, "open_code", self._read)
        for name in ("stat", "lstat", "access", "readlink", "chdir", "statvfs"):
            self._replace(os, name, self._read)
        for name in ("chmod", "chown", "lchown", "truncate", "utime"):
            self._replace(os, name, self._change)
        for name, instead in (("remove", self._remove), ("unlink", self._remove), ("rmdir", self._remove_folder)):
            self._replace(os, name, instead)
        self._replace(os, "open", self._open_descriptor)
        self._replace(os, "listdir", self._list)
        self._replace(os, "scandir", self._scan)
        self._replace(os, "mkdir", self._make_folder)
        for name, moves in (("rename", True), ("replace", True), ("link", False)):
            self._replace(os, name, self._rename if moves else self._link)
        self._replace(os, "symlink", self._link_by_name)
        self._replace(shutil, "rmtree", self._remove_tree)
        for name in ("stat", "listdir"):  # as importlib calls them
            setattr(posix, name, getattr(os, name))
        if accessor := getattr(pathlib, "_NormalAccessor", None):  # before Python 3.11
            for name in {*vars(accessor)} & {*vars(os)}:
                setattr(accessor, name, staticmethod(getattr(os, name)))

    def _replace(self, module: Any, name: str, instead: Callable[..., Any]) -> None:
        original = getattr(module, name)

        @wraps(original)
        def function(*arguments: Any, **keywords: Any) -> Any:
            if getattr(self._thread, "is_inside", False):
                return original(*arguments, **keywords)
            self._thread.is_inside = True
            try:
                return instead(original, *arguments, **keywords)
            finally:
                self._thread.is_inside = False

        setattr(module, name, function)

    # Paths

    def _place(self, path: Any, folder: int | None = None) -> str | None:
        """Return the path on the disk of what a function is given, or None if it is to work there."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        text = os.fsdecode(path)
        if folder is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        place = os.path.abspath(text)
        if is_below(place, self._root):
            place = place[len(self._root) :] or "/"
        place = os.path.join(os.path.realpath(os.path.dirname(place)), os.path.basename(place))
        if is_below(place, self._scratch):
            return None
        is_temporary = any(is_below(place, one) for one in self.writable)
        return None if is_temporary and not any(is_below(place, one) for one in self._folders) else place

    def _written(self, place: str) -> str:
        return self._root + place

    def _is_removed(self, place: str) -> bool:
        return any(is_below(place, gone) for gone in self._removed)

    def _seen(self, place: str) -> str:
        """Return where a file or folder is read: a removed one where there is nothing."""
        written = self._written(place)
        return written if os.path.lexists(written) or self._is_removed(place) else place

    def _require(self, place: str, path: Any) -> str:
        seen = self._seen(place)
        if not os.path.lexists(seen):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return seen

    def _to_write(self, place: str, keeps: bool) -> str:
        """Return where a file is written; with what it holds, if that is to be kept."""
        written = self._written(place)
        if not os.path.lexists(written):
            self._make_parents(place)
            if keeps and not self._is_removed(place) and os.path.isfile(place):
                shutil.copy2(place, written)
        return written

    def _make_parents(self, place: str) -> None:
        parent = os.path.dirname(place)
        if os.path.isdir(self._seen(parent)):  # else what is asked for fails
            os.makedirs(self._written(parent), exist_ok=True)

    def _names(self, place: str) -> list[str]:
        """Return what is in a folder."""
        written = self._written(place)
        names = set(os.listdir(written)) if os.path.isdir(written) else set()
        if not self._is_removed(place) and os.path.isdir(place):
            names |= {name for name in os.listdir(place) if not self._is_removed(os.path.join(place, name))}
        return sorted(names)

    def _discard(self, place: str) -> None:
        written = self._written(place)
        if os.path.isdir(written) and not os.path.islink(written):
            shutil.rmtree(written)
        elif os.path.lexists(written):
            os.remove(written)
        if os.path.lexists(place):
            self._removed.add(place)

    def _copy(self, place: str, target: str) -> None:
        seen = self._seen(place)
        if os.path.isdir(seen) and not os.path.islink(seen):
            os.makedirs(target, exist_ok=True)
            for name in self._names(place):
                self._copy(os.path.join(place, name), os.path.join(target, name))
        else:
            shutil.copy2(seen, target, follow_symlinks=False)

    # What takes the place of Python's functions

    def _open(self, original: Any, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        place = self._place(file)
        if place is None:
            return original(file, mode, *arguments, **keywords)
        if not set(mode) & set("wax+"):
            return original(self._where(place, file), mode, *arguments, **keywords)
        if "x" in mode and os.path.lexists(self._seen(place)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        keeps = "w" not in mode and "x" not in mode
        return original(self._to_write(place, keeps), mode, *arguments, **keywords)

    def _where(self, place: str, path: Any) -> Any:
        """Return the path itself if the disk is read, for the sake of messages."""
        seen = self._seen(place)
        return path if seen == place else seen

    def _open_descriptor(
        self, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> Any:
        place = self._place(path, dir_fd)
        if place is None:
            return original(path, flags, mode, dir_fd=dir_fd)
        if not flags & _WRITES:
            return original(self._seen(place), flags, mode)
        if flags & os.O_EXCL and os.path.lexists(self._seen(place)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return original(self._to_write(place, keeps=not flags & os.O_TRUNC), flags, mode)

    def _read(self, original: Any, path: Any, *arguments: Any, **keywords: Any) -> Any:
        place = self._place(path, keywords.get("dir_fd"))
        if place is None:
            return original(path, *arguments, **keywords)
        if keywords.pop("dir_fd", None) is not None:
            path = place
        return original(self._where(place, path), *arguments, **keywords)

    def _change(self, original: Any, path: Any, *arguments: Any, **keywords: Any) -> Any:
        place = self._place(path, keywords.get("dir_fd"))
        if place is None:
            return original(path, *arguments, **keywords)
        keywords.pop("dir_fd", None)
        if os.path.isdir(self._require(place, path)):
            os.makedirs(self._written(place), exist_ok=True)
        return original(self._to_write(place, keeps=True), *arguments, **keywords)

    def _remove(self, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None:
            return original(path, dir_fd=dir_fd)
        seen = self._require(place, path)
        if os.path.isdir(seen) and not os.path.islink(seen):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return self._discard(place)

    def _remove_folder(self, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None:
            return original(path, dir_fd=dir_fd)
        if not os.path.isdir(self._require(place, path)):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._names(place):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        return self._discard(place)

    def _remove_tree(self, original: Any, path: Any, ignore_errors: bool = False, *rest: Any, **keywords: Any) -> None:
        place = self._place(path, keywords.get("dir_fd"))
        if place is None:
            return original(path, ignore_errors, *rest, **keywords)
        if ignore_errors and not os.path.lexists(self._seen(place)):
            return None
        self._require(place, path)
        return self._discard(place)

    def _make_folder(self, original: Any, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is None:
            return original(path, mode, dir_fd=dir_fd)
        if os.path.lexists(self._seen(place)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._make_parents(place)
        return original(self._written(place), mode)

    def _rename(
        self, original: Any, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        first, second = self._place(source, src_dir_fd), self._place(target, dst_dir_fd)
        if first is None and second is None:
            return original(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if first is not None:
            self._require(first, source)
        if second is not None:
            self._discard(second)
            self._make_parents(second)
        there = target if second is None else self._written(second)
        if first is None:
            shutil.move(source, there)
            return None
        self._copy(first, there)
        return self._discard(first)

    def _link(self, original: Any, source: Any, target: Any, **keywords: Any) -> None:
        first, second = self._place(source), self._place(target)
        if first is None and second is None:
            return original(source, target, **keywords)
        there = target if second is None else self._to_write(second, keeps=False)
        shutil.copy2(source if first is None else self._require(first, source), there)
        return None

    def _link_by_name(self, original: Any, source: Any, target: Any, *arguments: Any, **keywords: Any) -> None:
        place = self._place(target)
        if place is None:
            return original(source, target, *arguments, **keywords)
        pointed = self._place(os.path.join(os.path.dirname(place), os.fsdecode(source)))
        there = source if pointed is None else self._seen(pointed)
        return original(there, self._to_write(place, keeps=False), *arguments)

    def _list(self, original: Any, path: Any = ".") -> list[Any]:
        place = self._place(path)
        if place is None or not os.path.isdir(self._seen(place)):
            return original(path if place is None else self._where(place, path))
        names = self._names(place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scan(self, original: Any, path: Any = ".") -> Any:
        place = self._place(path)
        if place is None or not os.path.isdir(self._seen(place)):
            return original(path if place is None else self._where(place, path))
        entries: dict[str, _Entry] = {}
        for folder in (self._written(place), place):
            if os.path.isdir(folder) and not (folder == place and self._is_removed(place)):
                for entry in original(folder):
                    if folder != place or not self._is_removed(os.path.join(place, entry.name)):
                        entries.setdefault(entry.name, _Entry(entry, path))
        return _Entries(iter(entries.values()))


class _Entry:
    """An os.DirEntry whose path begins with the folder that was asked for."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        name = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        self._entry, self.name, self.path = entry, name, os.path.join(os.fspath(folder), name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> Any:
        return self.path


class _Entries:
    """The iterator that os.scandir returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: there is nothing open."""
