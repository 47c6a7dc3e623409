"""Reads TOML and JSON that a user wrote; writes whole files or nothing; the cache of what can be made again."""

import json
import math
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.units import LARGEST


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary file beside ``path``, flush it to the disk, and rename it: readers see all or nothing.

    Raises OSError if the folder cannot be written or is full. The temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # an interrupt too
        temporary.unlink(missing_ok=True)
        raise


DEEPEST = 32
"""The most nested levels of tables and lists. Our files need four."""

_PARSERS: dict[str, Callable[[str], Any]] = {"TOML": tomllib.loads, "JSON": json.loads}


def read_document(path: Path, form: str) -> Any:
    """Read a file of ``TOML`` or ``JSON``. Raises SpecError, as ``read_text`` and ``parse_document``."""
    return parse_document(read_text(path, form), form, path)


def read_text(path: Path, form: str) -> str:
    """Read the text of a ``form`` (TOML or JSON) file. Raises SpecError, naming the file, if it is not UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not {form}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def parse_document(text: str, form: str, path: Path) -> Any:
    """Parse a file's text. Raises SpecError if it is no ``form``, too deep, or has a number beyond 64 bits."""
    try:
        document = _PARSERS[form](text)
        _check_numbers(document, "", 0)
    except RecursionError:
        raise SpecError(f"{path}: is nested too deeply; up to {DEEPEST} levels") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: is not {form}: {error}") from None
    except ValueError:  # of int(), for an integer of more than 4300 digits
        raise SpecError(f"{path}: holds a number that is too large; up to {LARGEST}") from None
    return document


def _check_numbers(value: Any, place: str, depth: int) -> None:
    """Refuse deep nesting, and numbers beyond 64 bits or not finite. Raises SpecError, naming the place."""
    if depth > DEEPEST:
        raise SpecError(f"is nested too deeply; up to {DEEPEST} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_numbers(inner, f"{place}.{key}" if place else key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner, place, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{place}: {value} is not allowed; a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise SpecError(f"{place}: {shown(value)} is not allowed; up to {LARGEST}")


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return ``$XDG_CACHE_HOME/fsdp-bench``, else ``~/.cache/fsdp-bench``; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "fsdp-bench"
    except RuntimeError:  # no HOME, and a user without an entry in passwd, as containers have
        return None


def private_folder(name: str) -> Path | None:
    """Return a folder of the cache for code that will run, which only this user may write; made where it is missing.

    In a cache that others may write to, or that is another user's, nothing is taken, changed or removed: the folder is
    then in ``fsdp-bench-UID`` beside it. The answer is None where there can be no private folder: no home, a disk that
    is full or read-only. Then the caller does without.
    """
    own = cache_folder()
    for base in () if own is None else (own, own.with_name(f"{own.name}-{os.geteuid()}")):
        folder = base / name
        with suppress(OSError):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(base) and _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    return None


def _is_private(folder: Path) -> bool:
    """Return whether a folder is there in which nobody else may write. Root's is as this user's: root writes in all."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _WRITABLE_BY_OTHERS


def cgroup_files(name: str, older_name: str) -> Iterator[Path]:
    """Yield the files of the memory of this process's cgroup, version 2 or 1; in a container the root is its own."""
    for line in lines_of(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, file = Path("/sys/fs/cgroup"), name
        elif "memory" in controllers.split(","):
            folder, file = Path("/sys/fs/cgroup/memory"), older_name
        else:
            continue
        yield from (folder / path.lstrip("/") / file, folder / file)


def cgroup_limit_bytes() -> int | None:
    """Return the memory limit of this process's cgroup. None if there is no limit."""
    for file in cgroup_files("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int(file.read_text())
            return limit if limit < 1 << 60 else None  # version 1 writes "no limit" as a huge number
    return None


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
