"""The allocator's replay compiled, ten times as fast, for searches over many models: compiled once, kept for later.

numba takes seconds; what it makes is kept in the user's cache directory, under a hash of the source and all else that
it depends on, and read from there the next time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from fsdp_bench.replay.allocator import Run
from fsdp_bench.replay.machine_code import MODULES, MachineCode, compile_run, processor
from fsdp_bench.spec.codec import write_atomically


@cache
def compiled_run() -> Run:
    """Return malloc.run in machine code."""
    path = kept_in()
    kept = None if path is None else _whole(path)
    if kept is not None:
        return MachineCode(kept)
    content = compile_run()
    if path is None:
        return MachineCode(content)
    with suppress(OSError):  # nothing can be kept there, and every process compiles for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _digest(content) + content)
    return MachineCode(content)


def is_kept() -> bool:
    """Whether it was compiled before."""
    path = kept_in()
    return path is not None and path.is_file()


def kept_in() -> Path | None:
    """Return the file of this source, made by this numba for this processor; None where there is no home folder."""
    made_by = f"numba {version('numba')} llvmlite {version('llvmlite')} {processor()}"
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in MODULES)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user without an entry in passwd, as containers have
        return None
    return base / "fsdp-bench" / f"replay-{sha256(sources + made_by.encode()).hexdigest()[:16]}.o"


def _whole(path: Path) -> bytes | None:
    """Return what this user kept; None for nothing, and for what was damaged since, which would end the process."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():  # in a shared cache: code of another user is not run
                return None
            kept = file.read()
    except OSError:
        return None
    digest, content = kept[: len(_digest(b""))], kept[len(_digest(b"")) :]
    return content if digest == _digest(content) else None


def _digest(content: bytes) -> bytes:
    return sha256(content).digest()
