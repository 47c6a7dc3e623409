"""The memory that CUDA's kernels allocate beside their results, by the operator's name and sizes."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_bench.simulate.operators.kernel_workspaces import (
    efficient_backward_workspace,
    efficient_forward_workspace,
    embedding_backward_workspace,
    flash_backward_workspace,
    flash_forward_workspace,
    row_sums,
    sum_over_rows_workspace,
)
from fsdp_bench.simulate.operators.kernels import Kernels, KernelScratch

_ATTENTION = "aten::_scaled_dot_product_"
_FLASH_ATTN = "flash_attn::flash_attn_func"


class Workspace(NamedTuple):
    """Bytes that a kernel allocates for itself, until it has allocated everything."""

    before: KernelScratch = ()
    """Before its results."""
    after_second: KernelScratch = ()
    """After the second of its results."""
    after: KernelScratch = ()


NONE = Workspace()


def workspace_of(
    name: str,
    dims: tuple[int, ...],
    itemsize: int,
    kernels: Kernels,
    num_bytes: int = 0,
    results: tuple[int, ...] = (),
    num_keys: int = 1,
) -> Workspace:
    """Return what the kernel of an operator allocates for itself.

    ``dims`` are its sizes, () where none were recorded; ``num_bytes`` is what it reads and writes, ``results`` are the
    bytes of what it returns. ``num_keys`` are the keys of unfused attention, for recordings that do not have its sizes.
    """
    result_bytes = results[0] if results else 0
    if name in ("aten::_safe_softmax", "aten::_softmax_backward_data"):
        return _of_softmax(name, dims, itemsize, num_bytes, result_bytes, num_keys)
    if not dims:
        return NONE
    if name.startswith((_ATTENTION, _FLASH_ATTN)):
        return _of_attention(name, dims, itemsize, kernels, results)
    if name == "aten::embedding_dense_backward":
        indices, rows, columns, *is_copied = dims
        copied = (indices * columns * itemsize,) * len(is_copied)
        before, after = embedding_backward_workspace(indices, rows, columns)
        return Workspace(before=(*copied, *before), after=after)
    if name == "aten::sum":
        return Workspace(after=tuple(sum_over_rows_workspace(dims[0], dims[1], kernels)))
    return NONE


def _of_attention(
    name: str, dims: tuple[int, ...], itemsize: int, kernels: Kernels, results: tuple[int, ...]
) -> Workspace:
    if name in (f"{_ATTENTION}flash_attention", _FLASH_ATTN):
        batch, heads, _, length, _, head_dim, _ = dims
        inside = flash_forward_workspace(batch, heads, length, head_dim, kernels.num_multiprocessors)
        return Workspace(after_second=tuple(inside))
    if name == f"{_ATTENTION}flash_attention_backward":
        batch, heads, groups, length, _, head_dim, _, *copies = dims
        copied = (batch * heads * length * head_dim * itemsize,) * sum(copies)
        inside = flash_backward_workspace(batch, heads, length, head_dim, heads // groups)
        return Workspace(before=copied, after=tuple(inside))
    if name == f"{_FLASH_ATTN}_backward":  # softmax_d is its result
        batch, heads, groups, length, _, head_dim, _ = dims
        return Workspace(after=tuple(flash_backward_workspace(batch, heads, length, head_dim, heads // groups)[1:]))
    if name == f"{_ATTENTION}efficient_attention":
        batch, heads, _, length, _, head_dim, _ = dims
        numel = results[0] // itemsize
        widths = head_dim, numel // (batch * heads * length)
        return Workspace(after_second=tuple(efficient_forward_workspace(numel, widths, itemsize)))
    if name == f"{_ATTENTION}efficient_attention_backward":
        # _efficient_attention_backward: each row's sum of grad_out * out, and what it adds up gradients in
        batch, heads, _, length, keys, head_dim, _ = dims
        values_dim = results[2] // (batch * heads * keys * itemsize) if len(results) > 2 else head_dim
        size = batch, heads, length, keys, (head_dim, values_dim), itemsize
        sums = row_sums(batch, heads, length, values_dim, itemsize)
        return Workspace(after=(*sums, efficient_backward_workspace(*size, kernels.compute_capability)))
    return NONE


def _of_softmax(
    name: str, dims: tuple[int, ...], itemsize: int, num_bytes: int, result_bytes: int, num_keys: int
) -> Workspace:
    if name == "aten::_softmax_backward_data":  # softmax_backward_cuda_out (SoftMax.cu): tmp = grad * output
        return Workspace(after=((num_bytes - result_bytes) // 2,))
    # _safe_softmax (SoftMax.cpp): masked = self.eq(-inf), masked_rows = all(masked), zero
    numel = result_bytes // itemsize
    return Workspace(after=(numel, dims[0] if dims else numel // num_keys, itemsize))
