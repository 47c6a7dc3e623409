"""Work of the host that is no operator: FSDP's hooks, in Python; and where checkpointing runs a forward again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_FSDP1 = (
    "_pre_forward",
    "_post_forward",
    "_pre_backward_hook",
    "_post_backward_hook",
    "_post_backward_reshard_only_hook",
)
"""Functions of torch/distributed/fsdp/_runtime_utils.py, some of which the wrapper's own module imports by name."""


def observe_fsdp(note: Callable[[str], None]) -> None:
    """Let each hook of FSDP be noted when it begins."""
    from torch.distributed.fsdp import _runtime_utils, fully_sharded_data_parallel

    for name in _FSDP1:
        for module in (_runtime_utils, fully_sharded_data_parallel):
            if hasattr(module, name):
                setattr(module, name, _noting(getattr(_runtime_utils, name), f"fsdp1 {name}", note))
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError:  # before torch 2.6
        return
    for name in ("_pre_forward", "_post_forward", "_pre_backward"):
        setattr(FSDPState, name, _noting(getattr(FSDPState, name), f"fsdp2 {name}", note))
    FSDPParamGroup.post_backward = _noting(FSDPParamGroup.post_backward, "fsdp2 _post_backward", note)


_NOTING = "_fsdp_bench_noting"
"""Attribute of a function that notes its calls."""


def _noting(original: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    if hasattr(original, _NOTING):
        return original

    @functools.wraps(original)
    def hook(*arguments: Any, **keywords: Any) -> Any:
        note(name)
        return original(*arguments, **keywords)

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
