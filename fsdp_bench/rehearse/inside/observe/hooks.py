"""The work of a step besides operators: kernels of Triton, FSDP's hooks in Python, recomputation.

Kernels of Triton are those that torch.compile wrote, and those of libraries such as Liger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..at_import import change_at_import

Observer = Callable[..., Any]
"""Is given a kernel's name, what launches it, its arguments, and further facts."""

_INDUCTOR = "torch._inductor.runtime.triton_heuristics"
_TRITON = "triton.runtime.jit"


def observe_triton(observer: Observer) -> None:
    """Let each launch of a kernel of Triton be observed."""
    changes = {_INDUCTOR: _observe_inductor, _TRITON: _observe_jit}
    change_at_import({name: functools.partial(change, observer=observer) for name, change in changes.items()})


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


_FSDP1 = (
    "_pre_forward",
    "_post_forward",
    "_pre_backward_hook",
    "_post_backward_hook",
    "_post_backward_reshard_only_hook",
)
"""Functions of torch/distributed/fsdp/_runtime_utils.py, some of which the wrapper's own module imports by name."""


_FSDP2 = {
    "_fsdp_param_group": {"FSDPParamGroup": ("post_backward",)},
    "_fsdp_state": {"FSDPState": ("_pre_forward", "_post_forward", "_pre_backward")},
}
"""Methods, by module of torch/distributed/fsdp/_fully_shard (torch 2.6 and later) and class."""


def observe_fsdp(note: Callable[[str], None]) -> None:
    """Let each hook of FSDP be noted when it begins."""

    def change_fsdp1(module: ModuleType) -> None:
        for name in _FSDP1:
            if hasattr(module, name):
                setattr(module, name, _noting(getattr(module, name), f"fsdp1 {name}", note))

    def change_fsdp2(module: ModuleType) -> None:
        for kind, names in _FSDP2[module.__name__.rpartition(".")[2]].items():
            for name in names:
                kind_of = getattr(module, kind)
                setattr(kind_of, name, _noting(getattr(kind_of, name), f"fsdp2 _{name.lstrip('_')}", note))

    folder = "torch.distributed.fsdp"
    change_at_import({f"{folder}.{name}": change_fsdp1 for name in ("_runtime_utils", "fully_sharded_data_parallel")})
    change_at_import({f"{folder}._fully_shard.{name}": change_fsdp2 for name in _FSDP2})


_NOTING = "_fsdp_bench_noting"
"""Attribute of a function that notes its calls."""


def _noting(original: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    """Return a function that notes its calls, and that Dynamo traces as it does the original.

    Dynamo traces FSDP1's hooks, and skips functions by the name of their file, so this one has the original's.
    """
    if hasattr(original, _NOTING):
        return original

    @functools.wraps(original)
    def hook(*arguments: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # which is True where Dynamo traces
            note(name)
        return original(*arguments, **keywords)

    hook.__code__ = hook.__code__.replace(co_filename=original.__code__.co_filename)
    setattr(hook, _NOTING, True)
    return hook


def observe_recomputation(change: Callable[[int], None]) -> None:
    """Call with 1 where torch.utils.checkpoint begins to run a forward again, with -1 where that ends."""
    from torch.utils import checkpoint

    hooks = getattr(checkpoint, "_recomputation_hook", None)
    if hooks is None:
        return  # then only gradient mode says so
    enter, leave = hooks.__enter__, hooks.__exit__

    def entered(self: Any) -> Any:
        change(1)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        change(-1)
        return leave(self, *error)

    hooks.__enter__, hooks.__exit__ = entered, left
