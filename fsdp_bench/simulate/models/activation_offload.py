"""Activation offload of blocks: torch.autograd.graph.save_on_cpu(pin_memory=True), which offload_wrapper is.

A block's saved tensors are copied to pinned host memory when they are saved, parameters among them, each as often as it
is saved, and back when backward needs them: all on the compute stream, without the host waiting. A checkpointed block
saves its inputs alone (torch/utils/checkpoint.py, _CheckpointFrame.save_inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fsdp_bench.simulate.events import Stream
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.tape import Tensor

ACTIVATIONS = "activations"
"""``Work.group`` of these copies, by which the host's memory is added up."""


class _OnHost(msgspec.Struct, frozen=True):
    """A tensor in host memory, with its place in the graph."""

    numel: int
    itemsize: int
    node: Any
    output: int


class _SaveOnCpu:
    """save_on_cpu: the hooks of saved tensors."""

    def __init__(self, op: Operators) -> None:
        self._op = op

    def pack(self, saved: list[Tensor]) -> list[_OnHost | Tensor]:
        """Copy to the host. What is not contiguous is first copied on the GPU (aten/native/cuda/Copy.cu)."""
        op = self._op
        packed: list[_OnHost | Tensor] = []
        for tensor in saved:
            if tensor.is_on_host:
                packed.append(tensor)
                continue
            num_bytes = tensor.numel * tensor.itemsize
            if tensor.is_strided and not op.kernels.observed:
                contiguous = op.temporary(tensor.numel, tensor.itemsize, "aten::contiguous")
                op.run("aten::clone", contiguous, contiguous)
                del contiguous
            op.tape.copy("to_host", num_bytes, Stream.COMPUTE, ACTIVATIONS)
            packed.append(_OnHost(tensor.numel, tensor.itemsize, tensor.node, tensor.output))
        return packed

    def unpack(self, packed: list[_OnHost | Tensor]) -> list[Tensor]:
        """Copy back to the GPU."""
        op = self._op
        tensors = []
        for one in packed:
            if isinstance(one, Tensor):
                tensors.append(one)
                continue
            tensor = op.temporary(one.numel, one.itemsize, "aten::_to_copy")
            op.tape.copy("to_device", one.numel * one.itemsize, Stream.COMPUTE, ACTIVATIONS)
            tensor.node, tensor.output = one.node, one.output
            tensors.append(tensor)
        return tensors


def offloaded(op: Operators) -> Callable[..., Any]:
    """Return what goes around a block, outside of its checkpointing."""
    hooks = _SaveOnCpu(op)

    def around(forward: Callable[..., Any], *inputs: Any) -> Any:
        op.tape.hooks.append(hooks)
        try:
            return forward(*inputs)
        finally:
            op.tape.hooks.pop()

    return around
