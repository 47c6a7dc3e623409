"""Side effects of observing a script on torch, undone: all stays as in a run without it.

Another effect is undone in C: stand_in/trace.c tells operators that no TorchDispatchMode is enabled.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from ..at_import import change_at_import


def keep_from_dynamo() -> None:
    """Let torch.compile run the functions of this package as they are, not trace them as a part of the script.

    Where only a part of a model can be compiled, Dynamo also compiles what is called in between. It would guard these
    functions by values which differ from block to block, and compile the operators that they run.
    """
    folder = f"{Path(__file__).parent.parent}/"

    def skip(rules: ModuleType) -> None:
        rules.SKIP_DIRS.append(folder)
        rules._recompile_re()

    change_at_import({"torch._dynamo.trace_rules": skip})
    package = __package__.rpartition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    for one in (value for module in modules for value in vars(module).values()):
        if isinstance(one, type) and is_dataclass(one) and one.__module__.startswith(package):
            # Python compiles it from a string, whose name is no file of this package.
            one.__init__.__code__ = one.__init__.__code__.replace(co_filename=f"{folder}{one.__qualname__}")


def read_large_integers_without(mode: TorchDispatchMode) -> None:
    """Let ``item()`` of a torch.uint64 beyond 2^63 - 1 work under a mode, where this version of torch cannot.

    Older versions (2.8 is one) take the result of an operator that Python has called to be an int64_t.
    """
    try:
        torch.ops.aten._local_scalar_dense(torch.tensor([-1], device="cpu").view(torch.uint64))
    except RuntimeError:
        original = torch.Tensor.item
    else:
        return

    @functools.wraps(original)
    def item(self: Any) -> Any:
        if self.dtype is not torch.uint64 or _get_current_dispatch_mode() is not mode:
            return original(self)
        with _pop_mode_temporarily():
            return original(self)

    torch.Tensor.item = item


def uncollected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function of the observer while Python's garbage collector waits.

    The collector runs after so many new containers (gc.set_threshold) and ends reference cycles, in which Dynamo leaves
    tensors of the GPU (torch/_dynamo/variables/lazy.py:LazyCache). If the observer's own containers made it run, those
    would be freed earlier than in a run without the observer. So what a function keeps must be no containers, either.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*arguments)
        finally:
            if was_enabled:
                gc.enable()

    return run
