"""Gradient clipping as train/step.py does it: the few small tensors that norms need."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernel_workspaces import foreach_norm_workspace, reduce_all_workspace
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.tape import Storage, Tape, Tensor


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
            op.scratch(reduce_all_workspace(numel, op.kernels), "Reduce.cuh")
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
    partial_norms = op.scratch(foreach_norm_workspace(numels), "aten::_foreach_norm")
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


# -- The gradient scaler of fp16: torch/amp/grad_scaler.py and torch/distributed/fsdp/sharded_grad_scaler.py -----------

_FP64 = 8


class Scaler:
    """Scales the loss; after backward looks for overflows in the gradients."""

    def __init__(self, op: Operators, is_fsdp1: bool, has_dtensors: bool, gradients_on_host: bool) -> None:
        self._op = op
        self._gradients_on_host = gradients_on_host
        self._is_sharded_grad_scaler = is_fsdp1
        self._has_dtensors = has_dtensors
        self._scale: Tensor | None = None
        self._growth_tracker: Storage | None = None
        self._found_inf: Storage | None = None

    def make_scale(self) -> Tensor:
        """GradScaler._lazy_init_scale_growth_tracker: the first call of ``scale`` makes both tensors, which stay."""
        if self._scale is None:
            self._scale = self._op.tape.tensor(1, FP32, "_scale", Category.TEMPORARY)
            self._growth_tracker = self._op.tape.storage(4, "_growth_tracker", Category.TEMPORARY)
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """GradScaler.scale. ShardedGradScaler's returns the dtype of a loss that model code computed in fp16."""
        scaled = self._op.mul(loss, self.make_scale())
        return self._op.to(scaled, loss.itemsize) if self._is_sharded_grad_scaler else scaled

    def unscale(self) -> None:
        """GradScaler.unscale_: the inverse scale through fp64, and one flag for all gradients."""
        tape = self._op.tape
        if self._is_sharded_grad_scaler or self._has_dtensors:  # whether any rank found an overflow
            tape.collective("all_reduce", "world" if self._is_sharded_grad_scaler else "shard", FP32)
        scratch = Scratch(tape)
        scratch.hold("aten::double", _FP64)
        scratch.hold("aten::reciprocal", _FP64)
        scratch.drop("aten::double")
        scratch.hold("aten::float", FP32)
        scratch.drop("aten::reciprocal")
        scratch.hold("aten::full", FP32)
        if self._gradients_on_host:  # the flag goes there and back; gradients are unscaled there
            scratch.drop("aten::full", "aten::float")
            scratch.hold("found_inf", FP32)
            scratch.drop("found_inf")
            return
        self._found_inf = tape.storage(FP32, "found_inf", Category.TEMPORARY)
        scratch.hold("found_inf copy", FP32)
        if self._has_dtensors:  # found_inf_reduce_handler
            scratch.hold("all_reduce", FP32)
            scratch.drop("all_reduce")
        scratch.drop("found_inf copy", "aten::full", "aten::float")

    def update(self) -> None:
        """GradScaler.update."""
        # _amp_update_scale_cpu_: growth_tracker + 1 == interval
        if self._is_sharded_grad_scaler and not self._op.kernels.is_cuda:
            growth = self._op.tape.storage(4, "aten::add", Category.TEMPORARY)
            self._op.tape.storage(1, "aten::eq", Category.TEMPORARY)
            del growth
        self._found_inf = None
