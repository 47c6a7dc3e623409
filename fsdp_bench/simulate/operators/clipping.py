"""Gradient clipping as train/step.py does it: the few small tensors that norms need."""

from collections.abc import Sequence

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernel_workspaces import foreach_norm_workspace, reduce_all_workspace
from fsdp_bench.simulate.operators.kernels import FP32
from fsdp_bench.simulate.tape import Storage, Tensor


def clip_sharded_fsdp1(op: Operators, numels: Sequence[int], itemsize: int) -> None:
    """FullyShardedDataParallel.clip_grad_norm_: norms in fp32, one all-reduce of their square.

    A rank without gradients, as of a shard of frozen parameters alone, takes a zero that it keeps (_get_grad_norm).

    ``numels`` are the elements of the gradients, in the order of the parameters.
    """
    local_norm = None
    if numels:
        norms = []
        for numel in numels:
            norms.append(op.temporary(1, FP32, "norms"))
            op.scratch(reduce_all_workspace(numel, op.kernels), "Reduce.cuh")
        stack = op.temporary(len(numels), FP32, "aten::stack")
        del norms
        local_norm = op.temporary(1, FP32, "local_norm")
        del stack
    squared = op.temporary(1, FP32, "squared")
    total_norm = op.temporary(1, FP32, "total_norm")
    del squared
    product, clamped = _coefficient(op, FP32)
    if itemsize != FP32:
        for _ in numels:  # grad.mul_(coefficient.to(grad.dtype))
            op.temporary(1, itemsize, "aten::_to_copy")
    del product, clamped, total_norm, local_norm


def reduce_norm_of_host_gradients(op: Operators, has_gradients: bool) -> None:
    """FullyShardedDataParallel.clip_grad_norm_ with offload: only the norm comes to the device, to be reduced."""
    names = ("local_norm", "squared", "total_norm") if has_gradients else ("squared", "total_norm")
    _held = [op.temporary(1, FP32, name) for name in names]


def clip_gradients(op: Operators, numels: Sequence[int], itemsize: int, is_distributed: bool) -> None:
    """torch.nn.utils.clip_grad_norm_: norms in the gradients' dtype.

    DTensors' norms are partial over the ranks: the second norm goes through squares and an all-reduce of them
    (torch/distributed/tensor/_ops/_math_ops.py, _NormPartial).

    ``numels`` are the elements of the gradients; of DTensors over several ranks (``is_distributed``), of this rank's.
    """
    partial_norms = op.scratch(foreach_norm_workspace(numels), "aten::_foreach_norm")
    norms = [op.temporary(1, itemsize, "norms") for _ in numels]
    del partial_norms
    stack, roots = op.temporary(len(numels), itemsize, "aten::stack"), None
    if is_distributed:
        # wait_tensor returns what was reduced as it is
        squares, reduced, roots = (
            op.temporary(len(numels), itemsize, each) for each in ("squares", "all_reduce", "roots")
        )
        del squares, reduced
    total_norm = op.temporary(1, itemsize, "total_norm")
    del stack, norms, roots
    product, clamped = _coefficient(op, itemsize)
    del product, clamped, total_norm


def _coefficient(op: Operators, itemsize: int) -> tuple[Tensor, Tensor]:
    """max_norm / (total_norm + 1e-6), clamped to one: return the product and what it is clamped to."""
    total = op.temporary(1, itemsize, "aten::add")
    reciprocal = op.temporary(1, itemsize, "aten::reciprocal")
    product = op.temporary(1, itemsize, "aten::mul")
    del reciprocal, total
    return product, op.temporary(1, itemsize, "aten::clamp")


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
        double = self._op.temporary(1, _FP64, "aten::double")
        reciprocal = self._op.temporary(1, _FP64, "aten::reciprocal")
        del double
        inverse = self._op.temporary(1, FP32, "aten::float")
        del reciprocal
        full = self._op.temporary(1, FP32, "aten::full")
        if self._gradients_on_host:  # the flag goes there and back; gradients are unscaled there
            del full, inverse
            self._op.temporary(1, FP32, "found_inf")
            return
        self._found_inf = tape.storage(FP32, "found_inf", Category.TEMPORARY)
        copy = self._op.temporary(1, FP32, "found_inf copy")
        if self._has_dtensors:  # found_inf_reduce_handler
            self._op.temporary(1, FP32, "all_reduce")
        del copy, full, inverse

    def update(self) -> None:
        """GradScaler.update."""
        # _amp_update_scale_cpu_: growth_tracker + 1 == interval
        if self._is_sharded_grad_scaler and not self._op.kernels.is_cuda:
            growth = self._op.tape.storage(4, "aten::add", Category.TEMPORARY)
            self._op.tape.storage(1, "aten::eq", Category.TEMPORARY)
            del growth
        self._found_inf = None
