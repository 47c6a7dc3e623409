"""Kernels of Triton: those that torch.compile wrote, and those of libraries such as Liger, with their arguments."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Observer = Callable[..., Any]
"""Is given a kernel's name, what launches it, its arguments, and further facts."""

_INDUCTOR = "torch._inductor.runtime.triton_heuristics"
_TRITON = "triton.runtime.jit"


def observe_triton(observer: Observer) -> None:
    """Let each launch of a kernel of Triton be observed."""
    replace = {_INDUCTOR: _observe_inductor, _TRITON: _observe_jit}
    waiting: dict[str, Callable[[ModuleType], None]] = {}
    for name, change in replace.items():
        if name in sys.modules:
            change(sys.modules[name], observer)
        else:
            waiting[name] = functools.partial(change, observer=observer)
    sys.meta_path.insert(0, _AtImport(waiting))


class _AtImport(importlib.abc.MetaPathFinder):
    """Changes a module when the script imports it: to import Inductor takes seconds."""

    def __init__(self, waiting: dict[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the module's own spec, whose loader then changes it."""
        change = self._waiting.pop(name, None)
        spec = importlib.util.find_spec(name) if change is not None else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            assert change is not None
            change(module)

        spec.loader.exec_module = load_and_change
        return spec


def _observe_inductor(module: ModuleType, observer: Observer) -> None:
    original = module.CachingAutotuner.run

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        launch = functools.partial(original, self, *arguments, **keywords)
        hints = self.size_hints or {}
        sizes = hints.values() if isinstance(hints, dict) else hints
        facts = {
            "names": list(self.fn.arg_names)[: len(arguments)],
            "changed": [name for name in self.fn.arg_names if name in self.mutated_arg_names],
            "sizes": [int(size) for size in sizes],
            "is_inductors": True,
            "module": "",
        }
        name = (self.inductor_meta or {}).get("kernel_name") or self.fn.__name__  # which is "triton_" in older versions
        return observer(name, launch, arguments, facts)

    module.CachingAutotuner.run = run


def _observe_jit(module: ModuleType, observer: Observer) -> None:
    original = module.JITFunction.run

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        launch = functools.partial(original, self, *arguments, grid=grid, warmup=warmup, **keywords)
        if warmup:
            return launch()
        given = dict(zip(self.arg_names, arguments, strict=False))
        given |= {name: value for name, value in keywords.items() if name in self.arg_names}
        module = getattr(self.fn, "__module__", "")
        facts = {"names": list(given), "changed": [], "sizes": [], "is_inductors": False, "module": module}
        return observer(self.fn.__name__, launch, list(given.values()), facts)

    module.JITFunction.run = run
