"""Counts the collectives of a step and their bytes, in the dispatcher, which all collectives of all backends pass."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KIND_OF_OPERATOR = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
"""The kind of collective by operator: c10d's (torch/csrc/distributed/c10d/Ops.cpp) and the functional ones."""

_NOT_COMMUNICATION = ("barrier", "wait_tensor", "monitored_barrier_", "_wrap_tensor_autograd")


class CollectiveCounter(TorchDispatchMode):
    """Counts calls, message bytes and group sizes by kind, and copies between host and device, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.message_bytes: dict[str, int] = defaultdict(int)
        self.group_sizes: dict[str, set[int]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the kind and size of a collective or copy, then run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        namespace, _, name = func.name().partition("::")
        operator = name.partition(".")[0]
        if namespace in ("c10d", "_c10d_functional") and operator not in _NOT_COMMUNICATION:
            kind = KIND_OF_OPERATOR.get(operator, "other")
            self._count(kind, _message_bytes(args))
            self.group_sizes[kind].update(map(_group_size, filter(_is_group, (*args, *kwargs.values()))))
        elif namespace == "aten" and operator in ("copy_", "_to_copy"):
            self._count_copy(operator, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.message_bytes[kind] += num_bytes

    def _count_copy(self, operator: str, args: Any, kwargs: Any) -> None:
        source = args[1] if operator == "copy_" else args[0]
        to = args[0].device if operator == "copy_" else torch.device(kwargs.get("device") or source.device)
        kinds = {("cpu", False): "copy_to_device", ("cpu", True): None}
        kind = kinds.get((source.device.type, to.type == "cpu"), "copy_to_host" if to.type == "cpu" else None)
        if kind is not None:
            self._count(kind, source.nbytes)


def _message_bytes(args: Any) -> int:
    """Return the bytes of the largest argument: the output of an all-gather, the input of a reduce-scatter."""

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.nbytes
        return sum(size(part) for part in value) if isinstance(value, list | tuple) else 0

    return max((size(arg) for arg in args), default=0)


def _is_group(value: Any) -> bool:
    """Return whether an argument is a boxed process group, or its name, as in functional collectives."""
    if isinstance(value, str):
        return value.isdigit()  # the other strings are reductions: "sum", "avg"
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def _group_size(group: Any) -> int:
    if isinstance(group, str):
        return int(distributed_c10d._resolve_process_group(group).size())  # type: ignore[attr-defined, arg-type]
    return int(dist.ProcessGroup.unbox(group).size())
