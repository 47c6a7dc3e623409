"""The script's reads from the GPU. Kernels do nothing, so such values are not those of training.

The stand-in calls back for every copy from device to host.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..replace import integers
from .user_lines import Frame, as_document, cause, current_frames

_MODULE = os.path.join("torch", "nn", "modules", "module.py")
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_char_p)

SIZES_FROM_VALUES = ("nonzero", "masked_select", "unique", "repeat_interleave", "bincount")
"""Operators whose output is as large as values say."""

PRINTING = os.path.join("torch", "_tensor_str.py")
"""PyTorch's file that makes text of a tensor. It selects the values that it needs; only the text depends on them."""

_Key = tuple[Frame | None, Frame | None, str, bool]
"""The innermost line outside of torch, the user's line, the operator, whether sizes may follow."""


class Reads:
    """Copies of unknown values from the GPU to the host, counted by the line that asks for them."""

    def __init__(self) -> None:
        self._counts: Counter[_Key] = Counter()
        self._num_bytes: Counter[_Key] = Counter()
        self._callback = _CALLBACK(self._read)
        self.num_known = 0
        """The number of reads of small integers, which are those of training (integers.py)."""

    def install(self) -> None:
        """Ask the stand-in to call back."""
        register = getattr(ctypes.CDLL(None), "stand_in_on_read", None)
        if register is not None:
            register.argtypes = [_CALLBACK]
            register.restype = None
            register(self._callback)

    def _read(self, num_bytes: int, operator: bytes | None) -> None:
        reading = integers.reading
        if reading.is_known:
            self.num_known += 1
            return
        frames = current_frames(1)
        if any(file.endswith(PRINTING) for file, _line, _function in frames):
            name, decides_sizes = "print", False
        else:
            name = reading.operator or (operator or b"copy").decode()
            decides_sizes = name in SIZES_FROM_VALUES or (reading.has_integers and _is_in_module(frames))
        key = *cause(frames), name, decides_sizes
        self._counts[key] += 1
        self._num_bytes[key] += num_bytes

    def document(self) -> list[dict[str, Any]]:
        """Return the lines that read, the most frequent first."""
        return [
            {
                "line": as_document(inner),
                "user_line": as_document(own),
                "operator": operator,
                "decides_sizes": decides_sizes,
                "count": count,
                "num_bytes": self._num_bytes[inner, own, operator, decides_sizes],
            }
            for (inner, own, operator, decides_sizes), count in self._counts.most_common()
        ]


def _is_in_module(frames: Sequence[Frame]) -> bool:
    """Whether a module's forward runs.

    Code that reads integers there takes them for sizes, as a mixture of experts does with the number of tokens for each
    expert. Code that reads them elsewhere most often logs them, such as a count of right answers.
    """
    return any(function == "_call_impl" and file.endswith(_MODULE) for file, _line, function in frames)


def own_runtime(failure: str) -> dict[str, int]:
    """Return the library whose own CUDA runtime could not start, if a failure's message says so, as unsupported()."""
    ask = getattr(ctypes.CDLL(None), "stand_in_own_runtime", None)
    if ask is None or "ymbol" not in failure:  # cudaErrorSymbolNotFound, "named symbol not found"
        return {}
    ask.restype = ctypes.c_char_p
    path = ask().decode()
    return {f"cuGetExportTable for {path.rpartition('site-packages/')[2]}": 1} if path else {}


def unsupported() -> dict[str, int]:
    """Return the functions that were called and that the stand-in lacks, with how often."""
    ask = getattr(ctypes.CDLL(None), "stand_in_unsupported", None)
    if ask is None:
        return {}
    ask.argtypes, ask.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t
    buffer = ctypes.create_string_buffer(ask(None, 0) + 1)
    ask(buffer, len(buffer))
    lines = buffer.value.decode().splitlines()
    return {name: int(count) for name, _space, count in (line.partition(" ") for line in lines)}
