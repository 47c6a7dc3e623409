"""The gradient scaler of fp16: torch/amp/grad_scaler.py and torch/distributed/fsdp/sharded_grad_scaler.py."""

from __future__ import annotations

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.clipping import Scratch
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.tape import Storage, Tensor

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
