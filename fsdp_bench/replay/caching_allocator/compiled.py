"""The allocator's replay compiled with numba, a hundred times as fast as Python.

numba takes half a second to import, and some seconds to compile, once: the compiled code is kept. So the first short
replays of a process run in Python. Callers that know of many more to come call ``compile_allocator`` first.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Mapping
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
from fsdp_bench.replay.caching_allocator.program import Code
from fsdp_bench.simulate import events
from fsdp_bench.spec.cache import has_private_folder, private_folder

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
    """Replace the functions of the allocator by compiled ones, for this process.

    A cache that cannot be read is compiled anew; where the new one cannot be written, either, nothing is kept.
    """
    functions = {
        name: function
        for module in _MODULES
        for name, function in vars(module).items()
        if isinstance(function, FunctionType) and function.__module__ == module.__name__ and function not in _IN_PYTHON
    }
    for _ in range(2):
        folder = private_folder(_cache_name())
        if folder is None:
            break
        try:
            _compile(functions, folder)
            return
        except Exception as error:  # whatever numba raises for a file that is cut off; pickle alone has five kinds
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                break
    _compile(functions, None)


def _compile(functions: Mapping[str, FunctionType], cached_in: Path | None) -> None:
    """Replace functions by compiled ones, and call them, so that numba compiles them and reads and writes its cache."""
    import numba

    if cached_in is not None:
        vars(numba.config)["CACHE_DIR"] = str(cached_in)
    compiled = {name: numba.njit(cache=cached_in is not None)(function) for name, function in functions.items()}
    for module in _MODULES:
        vars(module).update({name: function for name, function in compiled.items() if name in vars(module)})
    no_code = Code(*(array("q") for _ in Code._fields))
    execution.execute(heap.fresh_heap(0, False, 0, 8, 0), no_code, 0, 0, array("q", [0] * execution.NUM_FIELDS))


def is_kept() -> bool:
    """Return whether it was compiled before."""
    return has_private_folder(_cache_name())


def _cache_name() -> str:
    """Return the name of numba's cache folder, after all sources: numba itself would compare only one of them."""
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (*_MODULES, events))
    return f"allocator-{sha256(sources).hexdigest()[:16]}"
