"""The line of Python that something is attributed to: the innermost one outside of PyTorch and Python itself."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable

import torch

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_BESIDE_TORCH = os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__)))
_TORCH = tuple(os.path.join(_BESIDE_TORCH, name, "") for name in ("torch", "torchgen", "triton"))
_COMPILED = os.path.join(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/torchinductor_"), "")

LONGEST_LINE = 200
"""Characters of a line that are reported."""

Frame = tuple[str, int, str]
"""File, line, function."""


def is_torch_or_python(file: str) -> bool:
    """Whether a file is PyTorch's, Python's or this package's, or was made by torch.compile: none names a cause."""
    if file.startswith(("<", _HERE, _COMPILED, *_TORCH)):
        return True
    return file.startswith(_PYTHON) and not is_library(file)


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(name in file for name in _LIBRARIES)


def cause(frames: Iterable[Frame]) -> tuple[Frame | None, Frame | None]:
    """Return the innermost line outside of torch and Python, and the innermost line of the user's own files.

    ``frames`` is a stack, the innermost frame first.
    """
    innermost = None
    for frame in frames:
        if is_torch_or_python(frame[0]):
            continue
        innermost = innermost or frame
        if not is_library(frame[0]):
            return innermost, frame
    return innermost, None


def current_frames(skipped: int) -> list[Frame]:
    """Return this thread's stack, the innermost frame first, without the first ``skipped``."""
    found: list[Frame] = []
    frame = sys._getframe(skipped + 1)
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def user_files(words: Iterable[str]) -> list[str]:
    """Return files that decide what a script does: those and checkpoints that words name, and the user's modules."""
    paths = (path for word in words for path in (word, word.partition("=")[2]))
    named = (file for path in paths for file in (path, os.path.join(path, "config.json")))
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    imported = (file for file in modules if file and not is_torch_or_python(file) and not is_library(file))
    # torch.ops and torch.classes are modules whose files, "_ops.py" and "_classes.py", are nowhere.
    return sorted({os.path.abspath(file) for file in (*named, *imported) if os.path.isfile(file)})


def as_document(frame: Frame | None) -> dict[str, str | int] | None:
    """Return a line as JSON takes it."""
    if frame is None:
        return None
    text = linecache.getline(frame[0], frame[1]).strip()[:LONGEST_LINE]
    return {"file": frame[0], "line": frame[1], "function": frame[2], "text": text}
