"""The allocator's replay compiled with numba, a hundred times as fast as Python.

numba takes half a second to import and, once, some seconds to compile: it keeps what it made. So one short replay runs
in Python; whoever asks for many, or for a long one, compiles first.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType

from fsdp_bench.replay import heap, malloc, segments

_MODULES = (heap, segments, malloc)
_IN_PYTHON = (heap.fresh_heap, malloc.hand_over)


@cache
def compile_allocator() -> None:
    """Replace the functions of the allocator by compiled ones, for this process."""
    import numba

    can_keep = _keep_beside_home()
    compiled = {
        name: numba.njit(cache=can_keep)(function)
        for module in _MODULES
        for name, function in vars(module).items()
        if isinstance(function, FunctionType) and function.__module__ == module.__name__ and function not in _IN_PYTHON
    }
    for module in _MODULES:
        vars(module).update({name: function for name, function in compiled.items() if name in vars(module)})


def _keep_beside_home() -> bool:
    """Let numba keep its work in a folder named after the sources, all of which it would not compare itself."""
    import numba

    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _MODULES)
    try:
        home = Path.home() / ".cache"
    except RuntimeError:  # no HOME, and a user without an entry in passwd, as containers have
        return False
    vars(numba.config)["CACHE_DIR"] = str(home / "fsdp-bench" / sha256(sources).hexdigest()[:16])
    return True
