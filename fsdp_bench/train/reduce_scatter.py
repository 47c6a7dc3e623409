"""Torch's reduce-scatter replaced, where nobody is at the other end and where ranks share a GPU.

Every caller in torch looks it up in torch.distributed, so that replacing it there is enough.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_NAMES = ("reduce_scatter_tensor", "reduce_scatter_single")
"""2.13 has a new name beside the old one, 2.11 the old one alone."""

_ORIGINAL = "replaced_original"
"""The attribute of a replacement that holds torch's own function."""

Reduce = Callable[[inspect.BoundArguments], Any]
"""Reduces and scatters as the arguments say; returns the work."""


def keep_the_own_part() -> None:
    """Make the rank's own part of the input the output: the fake process group leaves the output as it is."""
    _replace(_keep_the_own_part)


def go_through_the_host(device_type: str = "cuda") -> None:
    """Reduce such a device's tensors in host memory.

    Gloo takes them too, but clones the whole input on the device to do so
    (ProcessGroupGloo::reduce_scatter_tensor_coalesced), which no job over NCCL has to hold.
    """
    _replace(functools.partial(_through_the_host, device_type))


def _replace(reduced: Callable[[Reduce, inspect.BoundArguments], Any]) -> None:
    for name in _NAMES:
        if hasattr(dist, name):
            found = getattr(dist, name)
            setattr(dist, name, _replacement(getattr(found, _ORIGINAL, found), reduced))


def _replacement(
    original: Callable[..., Any], reduced: Callable[[Reduce, inspect.BoundArguments], Any]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def reduce_scatter(*arguments: Any, **words: Any) -> Any:
        bound = signature.bind(*arguments, **words)
        return reduced(lambda found: original(*found.args, **found.kwargs), bound)

    setattr(reduce_scatter, _ORIGINAL, original)
    return reduce_scatter


def _keep_the_own_part(reduce: Reduce, bound: inspect.BoundArguments) -> Any:
    work = reduce(bound)
    output, whole = list(bound.arguments.values())[:2]
    group = bound.arguments.get("group") or dist.distributed_c10d._get_default_group()
    rank = dist.get_group_rank(group, dist.get_rank())
    output.copy_(whole.view(-1)[rank * output.numel() : (rank + 1) * output.numel()].view_as(output))
    return work


def _through_the_host(device_type: str, reduce: Reduce, bound: inspect.BoundArguments) -> Any:
    (output_name, output), (input_name, whole) = list(bound.arguments.items())[:2]
    if output.device.type != device_type:
        return reduce(bound)
    assert not bound.arguments.get("async_op"), "FSDP waits on streams, not on works"
    part = torch.empty_like(output, device="cpu")
    bound.arguments.update({output_name: part, input_name: whole.cpu()})
    reduce(bound)
    output.copy_(part)
    return None
