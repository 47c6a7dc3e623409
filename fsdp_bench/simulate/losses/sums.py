"""Sums of a number for each token."""

from __future__ import annotations

from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import BOOL, FP32
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
