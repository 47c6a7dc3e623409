"""The allocator's replay compiled to machine code by numba: ten times as fast, for searches over many models.

The functions are those of heap.py, segments.py and malloc.py as they stand, on plain pointers: for its own arrays numba
counts references and looks at the sign of every index, which takes as long again. numba takes seconds to compile them;
the result is kept in the user's cache directory, under the hash of their source, and read from there the next time.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fsdp_bench.predict import heap, malloc, segments
from fsdp_bench.predict.allocator import Run

_MODULES = (heap, segments, malloc)


@cache
def compiled_run() -> Run:
    """Return malloc.run in machine code."""
    import numba

    is_keeping = _make(cache_directory())
    if is_keeping:
        numba.config.CACHE_DIR = str(cache_directory())  # type: ignore[attr-defined]
    names: dict[str, object] = {}
    copies: dict[str, FunctionType] = {}
    for module in _MODULES:
        names.update(vars(module))
    for module in _MODULES:
        for function in _functions(module):
            # A copy that sees the other copies; the originals stay as they are.
            copies[function.__name__] = FunctionType(function.__code__, names, function.__name__)
    names.update({name: numba.njit(copy) for name, copy in copies.items()})
    pointer_to: Any = numba.types.CPointer
    integers = pointer_to(numba.int64)
    signature = numba.void(integers, pointer_to(integers), numba.int64, integers)
    compiled: Any = numba.cfunc(signature, cache=is_keeping)(copies["run"])
    pointer = ctypes.c_void_p
    call: Any = ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_int64, pointer)(compiled.address)
    call.owner = compiled  # of the machine code, which goes with it

    def run(heap: array[int], code: Sequence[array[int]], num_parts: int, at: array[int]) -> None:
        columns = array("q", map(_address, code))
        call(_address(heap), _address(columns), num_parts, _address(at))
        if at[malloc.STATUS] == malloc.RUNNING:  # what is raised in machine code goes no further
            raise KeyError("a tensor that is not alive")

    return run


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


def is_kept() -> bool:
    """Whether the functions were compiled before."""
    return any(cache_directory().glob("*/*.nbi"))


def _make(directory: Path) -> bool:
    """Make a directory; False where that is not allowed, and every process compiles for itself."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def cache_directory() -> Path:
    """Return where compiled functions are kept: their source's own, because numba looks at one file's date only."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "fsdp-bench" / sha256(sources).hexdigest()[:16]


def _functions(module: ModuleType) -> list[FunctionType]:
    own = (value for value in vars(module).values() if isinstance(value, FunctionType) and value is not heap.fresh_heap)
    return [function for function in own if function.__module__ == module.__name__]
