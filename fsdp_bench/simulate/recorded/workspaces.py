"""What CUDA's kernels allocate beside their results, by the operator's name and sizes."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_bench.simulate.operators.attention_workspaces import (
    efficient_backward_workspace,
    flash_backward_workspace,
    flash_forward_workspace,
)
from fsdp_bench.simulate.operators.kernels import FP32, Kernels
from fsdp_bench.simulate.operators.reduction_workspaces import embedding_backward_workspace, sum_over_rows_workspace

_ATTENTION = "aten::_scaled_dot_product_"


class Workspace(NamedTuple):
    """Bytes that a kernel allocates for itself, until it has allocated everything."""

    before: tuple[int, ...] = ()
    """Before its results."""
    after_second: tuple[int, ...] = ()
    """After the second of its results."""
    after: tuple[int, ...] = ()


NONE = Workspace()


def workspace_of(
    name: str, dims: tuple[int, ...], itemsize: int, kernels: Kernels, num_bytes: int = 0, result_bytes: int = 0
) -> Workspace:
    """Return what the kernel of an operator allocates; nothing where a dispatch mode watches, which does not see it.

    Args:
        name: of the operator.
        dims: its sizes; () where none were recorded.
        itemsize: bytes of an element.
        kernels: which kernels run.
        num_bytes: what it reads and writes.
        result_bytes: of its first result.
    """
    if kernels.observed:
        return NONE
    if name == "aten::_softmax_backward_data":  # softmax_backward_cuda_out (SoftMax.cu): tmp = grad * output
        return Workspace(after=((num_bytes - result_bytes) // 2,))
    if name == "aten::_safe_softmax":  # _safe_softmax (SoftMax.cpp): masked = self.eq(-inf); rows of it are left out
        return Workspace(after=(result_bytes // itemsize,))
    if not dims:
        return NONE
    if name == f"{_ATTENTION}flash_attention":
        batch, heads, _, length, _, head_dim, _ = dims
        inside = flash_forward_workspace(batch, heads, length, head_dim, kernels.num_multiprocessors)
        return Workspace(after_second=tuple(inside))
    if name == f"{_ATTENTION}flash_attention_backward":
        batch, heads, groups, length, _, head_dim, _ = dims
        return Workspace(after=tuple(flash_backward_workspace(batch, heads, length, head_dim, heads // groups)))
    if name == f"{_ATTENTION}efficient_attention_backward":
        return Workspace(after=_efficient_backward(dims, itemsize))
    if name == "aten::embedding_dense_backward":
        return Workspace(before=tuple(embedding_backward_workspace(*dims)))
    if name == "aten::sum":
        return Workspace(after=tuple(sum_over_rows_workspace(dims[0], dims[1], kernels)))
    return NONE


def _efficient_backward(dims: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """_efficient_attention_backward: each row's sum of grad_out * out, and in fp32 the queries' gradient in tiles."""
    batch, heads, _, length, _, head_dim, _ = dims
    sums = batch * heads * length * FP32
    if itemsize != FP32:
        return (sums,)
    return (sums, efficient_backward_workspace(batch, heads, length, head_dim))
