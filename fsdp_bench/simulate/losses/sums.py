"""Sums and means of a number for each token."""

from __future__ import annotations

from fsdp_bench.simulate.autograd import Gradients
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernels import BOOL, FP32, INT64
from fsdp_bench.simulate.operators.reduction_workspaces import reduce_all_workspace
from fsdp_bench.simulate.tape import Tensor


def sum_of_all(op: Operators, x: Tensor, itemsize: int, name: str = "aten::sum") -> Tensor:
    """aten::sum, or another reduction of all elements to one, of so many bytes; it adds up in at least fp32.

    Booleans become integers first (sum_out in aten/native/ReduceOps.cpp).
    """
    out = op.tape.tensor(1, itemsize, name)
    if x.itemsize == BOOL:
        x = op.to(x, itemsize)
    inside = [] if op.kernels.observed else reduce_all_workspace(x.numel, op.kernels, max(itemsize, FP32))
    _workspace = [op.temporary(1, size, "Reduce.cuh") for size in inside]
    op.run(name, x, out)
    return out


def mean_of_counted(op: Operators, losses: Tensor, targets: Tensor) -> Tensor:
    """loss.sum() / (target != ignore_index).sum(): the gradient is one number, expanded without a copy."""
    total = sum_of_all(op, losses, FP32)
    is_counted = op.tape.tensor(targets.numel, BOOL, "aten::ne")
    op.run("aten::ne", targets, is_counted)
    count = sum_of_all(op, is_counted, INT64)
    mean = op.tape.tensor(1, FP32, "aten::div")
    del total, is_counted

    def backward(saved: Saved, _gradients: list[Tensor]) -> Gradients:
        _opened = saved.copy()
        return (op.temporary(1, FP32, "aten::div"),)

    return op.record(mean, [losses], [count], backward)
