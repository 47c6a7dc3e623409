"""Changes a module when the script imports it: to import torch.distributed.checkpoint or Inductor takes seconds."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def change_at_import(changes: Mapping[str, Change]) -> None:
    """Change modules, by name: now if they are imported, else when they will be."""
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module: its own spec, whose loader then changes it. A script may also only ask whether it is there."""

    def __init__(self, name: str, change: Change) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._change(module)

        spec.loader.exec_module = load_and_change
        return spec
