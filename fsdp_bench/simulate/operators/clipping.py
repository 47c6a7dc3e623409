"""Gradient clipping as train/step.py does it: the few small tensors that norms need."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.operators.reduction_workspaces import foreach_norm_workspace, reduce_all_workspace
from fsdp_bench.simulate.tape import Storage, Tape


class Scratch:
    """Small temporaries by name."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._held: dict[str, list[Storage]] = {}

    def hold(self, name: str, num_bytes: int, count: int = 1) -> None:
        """Allocate one tensor, or several of one size."""
        self._held[name] = [self._tape.storage(num_bytes, name, Category.TEMPORARY) for _ in range(count)]

    def drop(self, *names: str) -> None:
        """Free."""
        for name in names:
            del self._held[name]


def clip_sharded_fsdp1(op: Operators, numels: Sequence[int], itemsize: int) -> None:
    """FullyShardedDataParallel.clip_grad_norm_: norms in fp32, one all-reduce of their square.

    A rank without gradients, as of a shard of frozen parameters alone, takes a zero that it keeps (_get_grad_norm).

    Args:
        op: the operators.
        numels: elements of the gradients, in the order of the parameters.
        itemsize: bytes of an element.
    """
    tape, num_gradients = op.tape, len(numels)
    scratch = Scratch(tape)
    if num_gradients:
        norms = []
        for numel in numels:
            norms.append(tape.storage(FP32, "norms", Category.TEMPORARY))
            op.scratch(() if op.kernels.observed else reduce_all_workspace(numel, op.kernels), "Reduce.cuh")
        scratch.hold("aten::stack", FP32 * num_gradients)
        del norms
        scratch.hold("local_norm", FP32)
        scratch.drop("aten::stack")
    scratch.hold("squared", FP32)
    scratch.hold("total_norm", FP32)
    scratch.drop("squared")
    _coefficient(scratch, FP32)
    if itemsize != FP32:
        for _ in range(num_gradients):  # grad.mul_(coefficient.to(grad.dtype))
            tape.storage(itemsize, "aten::_to_copy", Category.TEMPORARY)
    scratch.drop("aten::mul", "aten::clamp", "total_norm")
    if num_gradients:
        scratch.drop("local_norm")


def reduce_norm_of_host_gradients(tape: Tape, has_gradients: bool) -> None:
    """FullyShardedDataParallel.clip_grad_norm_ with offload: only the norm comes to the device, to be reduced."""
    scratch = Scratch(tape)
    held = ("local_norm", "squared", "total_norm") if has_gradients else ("squared", "total_norm")
    for name in held:
        scratch.hold(name, FP32)
    scratch.drop(*held)


def clip_gradients(op: Operators, numels: Sequence[int], itemsize: int, is_distributed: bool) -> None:
    """torch.nn.utils.clip_grad_norm_: norms in the gradients' dtype.

    DTensors' norms are partial over the ranks: the second norm goes through squares and an all-reduce of them
    (torch/distributed/tensor/_ops/_math_ops.py, _NormPartial).

    Args:
        op: the operators.
        numels: elements of the gradients; of DTensors, of this rank's.
        itemsize: bytes of an element.
        is_distributed: whether they are DTensors over several ranks.
    """
    scratch, vector = Scratch(op.tape), itemsize * len(numels)
    partial_norms = op.scratch(() if op.kernels.observed else foreach_norm_workspace(numels), "aten::_foreach_norm")
    scratch.hold("norms", itemsize, len(numels))
    del partial_norms
    scratch.hold("aten::stack", vector)
    if is_distributed:
        scratch.hold("squares", vector)
        scratch.hold("all_reduce", vector)  # wait_tensor returns it as it is
        scratch.hold("roots", vector)
        scratch.drop("squares", "all_reduce")
    scratch.hold("total_norm", itemsize)
    scratch.drop("aten::stack", "norms")
    if is_distributed:
        scratch.drop("roots")
    _coefficient(scratch, itemsize)
    scratch.drop("aten::mul", "aten::clamp", "total_norm")


def _coefficient(scratch: Scratch, itemsize: int) -> None:
    """max_norm / (total_norm + 1e-6), clamped to one."""
    scratch.hold("aten::add", itemsize)
    scratch.hold("aten::reciprocal", itemsize)
    scratch.hold("aten::mul", itemsize)
    scratch.drop("aten::reciprocal", "aten::add")
    scratch.hold("aten::clamp", itemsize)
