"""The command that starts a module of this package in this Python."""

from __future__ import annotations

import sys


def own_python(module: str, *arguments: str) -> list[str]:
    """Return the command for ``python -m module``, which finds no module in the current folder.

    A file such as random.py lies there by chance, or was put there; -P keeps it off Python's path.
    """
    return [sys.executable, "-P", "-m", module, *arguments]
