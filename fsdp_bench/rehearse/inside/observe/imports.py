"""The modules of installed packages that a script imports, for a process that imports them before it is forked.

None that comes after the script itself changes the environment, which imports may read; and none at all if the script
puts functions or classes of its own into those modules, which others that are imported later may take.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from .user_lines import cause, current_frames, is_library, is_torch_or_python

_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")


class Imports:
    """The modules, as they are until the environment changes."""

    def __init__(self) -> None:
        self._names: list[str] | None = None
        """Those at the first change."""
        for name in ("putenv", "unsetenv"):
            setattr(os, name, self._observed(getattr(os, name)))

    def _observed(self, original: Callable[..., None]) -> Callable[..., None]:
        def change(*arguments: Any) -> None:
            original(*arguments)
            inner, own = cause(current_frames(1))
            if self._names is None and own is not None and inner == own:
                self._names = [*sys.modules]

        return change

    def files(self) -> dict[str, str]:
        """Return the modules' names and files, in the order in which their imports began."""
        files = {name: file for name in self._names or [*sys.modules] if (file := _file(sys.modules.get(name)))}
        return {} if any(_is_changed(sys.modules[name]) for name in files if is_library(files[name])) else files


def _file(module: ModuleType | None) -> str | None:
    """Return the file of a module of Python or of an installed package."""
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and (is_library(file) or file.startswith(_STANDARD)) else None


def _is_changed(module: ModuleType) -> bool:
    """Whether the script has put something of its own into a module, or into a class that is defined there."""
    for value in [*vars(module).values()]:
        if _is_users(value):
            return True
        is_class = issubclass(type(value), type) and value.__module__ == module.__name__
        if is_class and any(map(_is_users, vars(value).values())):
            return True
    return False


def _is_users(value: Any) -> bool:
    if type(value) is FunctionType:
        file = value.__code__.co_filename
    elif issubclass(type(value), type):  # isinstance asks the object
        if value.__module__ == "__main__":
            return True
        file = getattr(sys.modules.get(value.__module__), "__file__", None) or "<built-in>"
    else:
        return False
    return not (is_torch_or_python(file) or is_library(file))
