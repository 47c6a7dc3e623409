"""The allocator's replay compiled with numba, a hundred times as fast as Python.

numba takes half a second to import, and some seconds to compile, once: the compiled code is kept. So the first short
replays of a process run in Python. Callers that know of many more to come call ``compile_allocator`` first.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType

from fsdp_bench.replay.caching_allocator import (
    execution,
    expandable_segments,
    heap,
    malloc,
    segments,
    sizes,
    split_and_merge,
)
from fsdp_bench.simulate import events

_MODULES = (heap, sizes, split_and_merge, expandable_segments, segments, malloc, execution)
_IN_PYTHON = (heap.fresh_heap, execution.rename_tensors)

LOAD_AFTER = 100_000
"""Instructions of programs that take Python as long to replay as it takes to import numba and load what is kept."""
COMPILE_AFTER = 2_000_000
"""Instructions of programs that take Python as long to replay as it takes to compile."""

_num_replayed = 0


def compile_if_much_is_replayed(num_instructions: int) -> None:
    """Compile the allocator if this process, with the next program, has replayed as much as compiling it costs."""
    global _num_replayed
    _num_replayed += num_instructions
    if _num_replayed > (LOAD_AFTER if is_kept() else COMPILE_AFTER):
        compile_allocator()


@cache
def compile_allocator() -> None:
    """Replace the functions of the allocator by compiled ones, for this process."""
    import numba

    folder = _kept_in()
    if folder is not None:
        vars(numba.config)["CACHE_DIR"] = str(folder)
    compiled = {
        name: numba.njit(cache=folder is not None)(function)
        for module in _MODULES
        for name, function in vars(module).items()
        if isinstance(function, FunctionType) and function.__module__ == module.__name__ and function not in _IN_PYTHON
    }
    for module in _MODULES:
        vars(module).update({name: function for name, function in compiled.items() if name in vars(module)})


def is_kept() -> bool:
    """Return whether it was compiled before."""
    folder = _kept_in()
    return folder is not None and folder.is_dir()


def _kept_in() -> Path | None:
    """Return numba's cache folder, named after the hash of all sources: numba itself would compare only one of them."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (*_MODULES, events))
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user without an entry in passwd, as containers have
        return None
    return base / "fsdp-bench" / sha256(sources).hexdigest()[:16]
