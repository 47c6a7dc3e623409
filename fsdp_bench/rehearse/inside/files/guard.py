"""Python's own functions, replaced so that what a script writes, renames or removes changes a scratch folder alone.

Processes that are forked from this one do the same.

Not covered: files that C++, Rust or another program writes by itself; protection.py has the kernel refuse those.
"""

from __future__ import annotations

import _imp
import _io
import copy
import errno
import os
import pathlib  # noqa: F401 - before Python 3.10 its class would take replaced functions for methods
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from threading import local
from typing import Any

from .places import Changes, is_below
from .scratch import ScratchFiles, fail

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard(ScratchFiles):
    """The replaced functions."""

    installed: Guard | None = None
    """That of this process, or of the process that it is forked from."""

    def __init__(self, scratch: str, folders: Sequence[str]) -> None:
        """Replace them. ``folders``, which are real paths, are guarded even in a temporary folder."""
        super().__init__(scratch, folders)
        self._thread = local()
        self._instead: dict[int, tuple[Any, Any]] = {}
        """By identity: what is replaced, and what takes its place."""
        self._replace_all()
        Guard.installed = self

    def begin_anew(self, scratch: str, folders: Sequence[str]) -> None:
        """Guard with another scratch folder, in a fork of the process that has replaced the functions."""
        with self.inside():
            super().__init__(scratch, folders)

    def changes(self) -> Changes:
        """Count the files that are not on the disk, without Python's caches, and those that the script removed."""
        with self.inside():
            return self._changes()

    def seen(self, path: Any) -> Any:
        """Return the path that a library which does not open files by Python has to read."""
        with self.inside():
            return self._to_read(path)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let Python's functions be what they were, for this thread; see what was removed until now."""
        before, self._thread.is_inside = getattr(self._thread, "is_inside", False), True
        try:
            self._read_log()
            yield
        finally:
            self._thread.is_inside = before

    def _replace_all(self) -> None:
        functions: dict[Callable[..., Any], str] = {
            self._read: "stat access statvfs getxattr listxattr",
            partial(self._read, follows=False): "lstat readlink",
            self._change: "chmod chown truncate utime setxattr removexattr fchmod fchown",
            partial(self._change, follows=False): "lchown",
            self._make: "mkdir mkfifo mknod",
            self._remove: "remove unlink",
            self._remove_folder: "rmdir",
            self._rename: "rename replace",
            self._link: "link",
            self._link_by_name: "symlink",
            self._open_descriptor: "open",
            self._list: "listdir",
            self._scan: "scandir",
            self._enter: "chdir",
            self._working_directory: "getcwd",
        }
        for function, names in functions.items():
            for name in names.split():
                self._replace(os, name, function)
        self._replace(shutil, "rmtree", self._remove_tree)
        self._replace(_io, "open", self._open)
        self._replace(_io, "open_code", self._read)
        self._replace(_imp, "create_dynamic", self._load_extension)
        for module, name, instead in (
            ("_ctypes", "dlopen", self._load_library),
            ("_sqlite3", "connect", self._connect),
        ):
            try:
                self._replace(import_module(module), name, instead)
            except ImportError:  # a Python that was built without it
                continue
        self._instead[id(_io.FileIO)] = _io.FileIO, _file_io(self)
        replace_everywhere(self._instead)

    def _replace(self, module: Any, name: str, instead: Callable[..., Any]) -> None:
        if (original := getattr(module, name, None)) is None:
            return

        @wraps(original)
        def function(*arguments: Any, **keywords: Any) -> Any:
            if getattr(self._thread, "is_inside", False):
                return original(*arguments, **keywords)
            with self.inside():
                try:
                    return instead(original, *arguments, **keywords)
                except OSError as error:
                    if arguments and self._is_ours(error.filename):
                        error.filename = arguments[0]
                    raise

        self._instead[id(original)] = original, function

    def _open(self, original: Any, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("opener") is not None:  # which calls os.open
            self._thread.is_inside = False
            return original(file, mode, *arguments, **keywords)
        return original(self.opened(file, mode), mode, *arguments, **keywords)

    def opened(self, file: Any, mode: str) -> Any:
        """Return the path to open for a file and a mode as of the built-in open; other files as they are."""
        place, given = self._place(file)
        if place is None:
            return given
        if not set(mode) & set("wax+"):
            return self._to_read(file)
        if self._is_folder(place):
            fail(errno.EISDIR, file)
        if "x" in mode and self._status(place) is not None:
            fail(errno.EEXIST, file)
        if "r" in mode:
            self._require(place, file)
        return self._to_write(place, "w" not in mode and "x" not in mode, file)

    def _open_descriptor(
        self, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> Any:
        place, given = self._place(path, dir_fd, not flags & os.O_NOFOLLOW)
        if place is None:
            return original(given, flags, mode, dir_fd=dir_fd)
        if not flags & _WRITES:
            return original(self._to_read(path, dir_fd, not flags & os.O_NOFOLLOW), flags, mode)
        if self._status(place) is None and not flags & os.O_CREAT:
            fail(errno.ENOENT, path)
        if self._status(place) is not None and flags & os.O_EXCL:
            fail(errno.EEXIST, path)
        if self._is_folder(place):
            fail(errno.EISDIR, path)
        return original(self._to_write(place, not flags & os.O_TRUNC, path), flags, mode)

    def _read(self, original: Any, path: Any, *arguments: Any, follows: bool = True, **keywords: Any) -> Any:
        follows = keywords.get("follow_symlinks", follows)
        seen = self._to_read(path, keywords.get("dir_fd"), follows)
        return original(seen, *arguments, **keywords)

    def _enter(self, original: Any, path: Any) -> None:
        """Change the working directory: into one of the disk if there is one, for programs that read there."""
        place, _ = self._place(path)
        on_disk = place is not None and os.path.isdir(place) and not self._is_removed(place)
        original(place if on_disk else self._to_read(path))

    def _working_directory(self, original: Any) -> str:
        folder: str = original()
        return folder[len(self._root) :] if is_below(folder, self._root) else folder

    def _change(self, original: Any, path: Any, *arguments: Any, follows: bool = True, **keywords: Any) -> Any:
        if isinstance(path, int):
            is_theirs = self._is_ours(os.readlink(f"/proc/self/fd/{path}")) or self._opened(path) is None
            return original(path, *arguments, **keywords) if is_theirs else None
        place, given = self._place(path, keywords.get("dir_fd"), keywords.get("follow_symlinks", follows))
        if place is None:
            return original(given, *arguments, **keywords)
        keywords.pop("dir_fd", None)
        self._require(place, path)
        if self._is_folder(place):
            os.makedirs(self._written(place), exist_ok=True)
        return original(self._to_write(place, True, path), *arguments, **keywords)

    def _make(self, original: Any, path: Any, *arguments: Any, dir_fd: int | None = None, **keywords: Any) -> None:
        place, given = self._place(path, dir_fd, follows=False)
        if place is None:
            return original(given, *arguments, dir_fd=dir_fd, **keywords)
        if self._status(place) is not None:
            fail(errno.EEXIST, path)
        self._make_parents(place, path)
        return original(self._written(place), *arguments, **keywords)

    def _remove(self, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place, given = self._place(path, dir_fd, follows=False)
        if place is None:
            return original(given, dir_fd=dir_fd)
        self._require(place, path)
        if self._is_folder(place):
            fail(errno.EISDIR, path)
        return self._discard(place)

    def _remove_folder(self, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
        place, given = self._place(path, dir_fd, follows=False, moves=True)
        if place is None:
            return original(given, dir_fd=dir_fd)
        self._require(place, path)
        if not self._is_folder(place):
            fail(errno.ENOTDIR, path)
        if self._names(place):
            fail(errno.ENOTEMPTY, path)
        return self._discard(place)

    def _remove_tree(
        self, original: Any, path: Any, ignore_errors: bool = False, onerror: Any = None, **keywords: Any
    ) -> None:
        place, given = self._place(path, keywords.get("dir_fd"), follows=False, moves=True)
        if place is None:
            return original(given, ignore_errors, onerror, **keywords)
        try:
            self._require(place, path)
            if not self._is_folder(place):
                fail(errno.ENOTDIR, path)
        except OSError as error:
            if ignore_errors:
                return None
            if (onexc := keywords.get("onexc")) is not None:
                return onexc(os.lstat, path, error)
            if onerror is not None:
                return onerror(os.lstat, path, sys.exc_info())
            raise
        return self._discard(place)

    def _rename(
        self, original: Any, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        first, source_given = self._place(source, src_dir_fd, follows=False, moves=True)
        second, target_given = self._place(target, dst_dir_fd, follows=False)
        if first is None and second is None:
            return original(source_given, target_given, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        if first is not None:
            self._require(first, source)
        if first == second:
            return None
        if second is not None:
            self._require_replaceable(first, source_given, second, target)
            self._discard(second)
            self._make_parents(second, target)
        there = target_given if second is None else self._written(second)
        if first is None:
            shutil.move(source_given, there)
        else:
            self._copy(first, there)
            self._discard(first)
        return self._note("")  # links may be in it

    def _require_replaceable(self, first: str | None, source: Any, second: str, target: Any) -> None:
        """Raise what rename(2) says of a target that cannot be replaced by a source."""
        moves_folder = os.path.isdir(source) if first is None else self._is_folder(first)
        if moves_folder and first is not None and is_below(second, first):
            fail(errno.EINVAL, target)
        if self._is_folder(second):
            if not moves_folder:
                fail(errno.EISDIR, target)
            if self._names(second):
                fail(errno.ENOTEMPTY, target)
        elif moves_folder and self._status(second) is not None:
            fail(errno.ENOTDIR, target)

    def _link(
        self,
        original: Any,
        source: Any,
        target: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **keywords: Any,
    ) -> None:
        """Copy: a second name of a file on the disk would let it be changed."""
        first, source_given = self._place(source, src_dir_fd, keywords.get("follow_symlinks", True))
        second, target_given = self._place(target, dst_dir_fd, follows=False)
        if first is None and second is None:
            return original(source_given, target_given, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **keywords)
        if first is not None:
            self._require(first, source)
        if second is not None and self._status(second) is not None:
            fail(errno.EEXIST, target)
        there = target_given if second is None else self._to_write(second, False, target)
        shutil.copy2(source_given if first is None else self._seen(first), there)
        return None

    def _link_by_name(
        self, original: Any, source: Any, target: Any, *arguments: Any, dir_fd: int | None = None, **keywords: Any
    ) -> None:
        place, given = self._place(target, dir_fd, follows=False)
        if place is None:
            return original(source, given, *arguments, dir_fd=dir_fd, **keywords)
        if self._status(place) is not None:
            fail(errno.EEXIST, target)
        original(source, self._to_write(place, False, target), *arguments, **keywords)
        return self._note("")

    def _folder(self, path: Any) -> tuple[str | None, Any]:
        """Return _place of a folder, which may be open."""
        return (self._opened(path), path) if isinstance(path, int) else self._place(path)

    def _list(self, original: Any, path: Any = ".") -> list[Any]:
        place, given = self._folder(path)
        if place is None or not self._is_folder(place):
            return original(given if place is None else self._to_read(path))
        names = self._names(place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scan(self, original: Any, path: Any = ".") -> Any:
        place, given = self._folder(path)
        if place is None or not self._is_folder(place):
            return original(given if place is None else self._to_read(path))
        entries: dict[str, _Entry] = {}
        for folder in (self._written(place), place):
            if os.path.isdir(folder) and not (folder == place and self._is_removed(place)):
                for entry in original(folder):
                    if folder != place or not self._is_removed(os.path.join(place, entry.name)):
                        entries.setdefault(entry.name, _Entry(entry, path))
        return _Entries(iter(entries.values()))

    def _load_extension(self, original: Any, spec: Any, *arguments: Any) -> Any:
        seen = copy.copy(spec)
        seen.origin = self._to_load(spec.origin)
        return original(seen, *arguments)

    def _load_library(self, original: Any, name: Any, *arguments: Any) -> Any:
        return original(self._to_load(name) if name and "/" in os.fsdecode(name) else name, *arguments)

    def _connect(self, original: Any, database: Any, *arguments: Any, **keywords: Any) -> Any:
        """Open a database of SQLite, whose own journal is beside it."""
        if database in (":memory:", "") or keywords.get("uri"):
            return original(database, *arguments, **keywords)
        place, given = self._place(database)
        if place is None:
            return original(given, *arguments, **keywords)
        for journal in ("-wal", "-journal"):
            if self._status(place + journal) is not None:
                self._to_write(place + journal, True, database)
        return original(self._to_write(place, True, database), *arguments, **keywords)


def replace_everywhere(instead: dict[int, tuple[Any, Any]]) -> None:
    """Put functions and classes in place of others: in modules that have imported these, and in their classes.

    pathlib's and glob's classes have some as static methods.
    """
    for module in [*sys.modules.values()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in instead:
                setattr(module, name, instead[id(value)][1])
            elif issubclass(type(value), type) and value.__module__ == module.__name__:  # isinstance asks the object
                for attribute, member in [*vars(value).items()]:
                    if (found := instead.get(id(getattr(member, "__func__", member)))) is not None:
                        setattr(value, attribute, staticmethod(found[1]))
    for original, function in instead.values():
        for functions in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in functions:
                functions.add(function)


def _file_io(guard: Guard) -> type[_io.FileIO]:
    """Return the class of opened files, with paths as the guard has them."""
    original = _io.FileIO

    class OfAnyFile(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class FileIO(original, metaclass=OfAnyFile):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> None:
            with guard.inside():
                path = guard.opened(file, mode)
            super().__init__(path, mode, *arguments, **keywords)

    return FileIO


class _Entry:
    """An os.DirEntry whose path begins with the folder that was asked for."""

    def __init__(self, entry: os.DirEntry[str], folder: Any) -> None:
        name = os.fsencode(entry.name) if isinstance(folder, bytes) else entry.name
        path = name if isinstance(folder, int) else os.path.join(os.fspath(folder), name)
        self._entry, self.name, self.path = entry, name, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> Any:
        return self.path


class _Entries(nullcontext[Any]):
    """The result of os.scandir; there is nothing to close."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        super().__init__(self)
        self._entries = entries

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def close(self) -> None:
        """Do nothing."""
