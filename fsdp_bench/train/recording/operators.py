"""The dimensions of the operators of a recorded step, from which their times and their kernels' needs are computed.

matrix products                  m, n, k, and in the name which of the matrices are transposed; several of them as
one with so many more rows
attention and its backward       batch, heads, key-value heads, length of the queries, of the keys, head size, and
1 if it is causal, else 0; where flash attention's backward copies tensors like the output, how many
aten::embedding_dense_backward   indices, rows, columns; 1 where the gradient is copied because it is not contiguous
aten::sum over rows              rows, columns
aten::_safe_softmax              rows, columns
pointwise, without vectors       elements, and in the name why (spec/pointwise.py): aten::mul strided
any other                        nothing: the bytes that it reads and writes decide
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fsdp_bench.spec.pointwise import COPIES, STRIDED, Operand, is_strided_cat, path_of
from fsdp_bench.train.recording.formulas import Size

_MAKES_ONLY = (
    *("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::alias"),
    *("aten::_unsafe_view", "prim::device"),
)
"""Operators that read and write nothing."""


def is_view(func: Any) -> bool:
    """Whether an operator returns a view and does nothing else."""
    returned = func._schema.returns
    alias = returned[0].alias_info if returned else None
    return alias is not None and not alias.is_write


def work_of(func: Any, args: Any, result: Any) -> tuple[str, Size, int, list[Size]] | None:
    """Return an operator's name, bytes read and written, itemsize and dimensions; None if it does nothing."""
    name = func.name().partition(".")[0]
    if is_view(func) or name.startswith(_MAKES_ONLY):
        return None
    read, written = _tensors(args), _tensors(result)
    tensors = [*read, *(tensor for tensor in written if all(tensor is not other for other in read))]
    if not tensors:
        return None
    itemsize = (read or written)[0].element_size()
    num_bytes = Size.sum_of(  # what is expanded is read once
        (*(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride or n == 1), t.element_size())
        for t in tensors
    )
    label, dims = _DIMS.get(name, _pointwise)(name, args, result)
    if torch.Tag.pointwise not in func.tags and name not in (*COPIES, *_DIMS):
        label, dims = name, []
    return label, num_bytes, itemsize, dims


def _pointwise(name: str, args: Any, result: Any) -> tuple[str, list[Size]]:
    written = next(iter(_tensors(result)), None)
    read = [
        one
        for one in _tensors(args[1:2] if name == "aten::copy_" else args)
        if one.dim() or getattr(one, "fake_device", one.device).type != "cpu"
    ]
    path = "" if written is None else path_of(name, list(map(_operand, read)), _operand(written))
    return (f"{name} {path}", [Size.product(*written.shape)]) if path and written is not None else (name, [])


def _cat(name: str, args: Any, result: Any) -> tuple[str, list[Size]]:
    read = [_operand(one) for one in args[0] if one.numel()]
    is_strided = is_strided_cat(read, _operand(result), result.element_size())
    return (f"{name} {STRIDED}", [Size.product(*result.shape)]) if is_strided else (name, [])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _operand(tensor: Tensor) -> Operand:
    return Operand(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), str(tensor.dtype)[6:])


def _layout(*matrices: Tensor) -> str:
    """Return for each matrix whether its rows are contiguous (n) or its columns (t), as cuBLAS calls it."""
    return "".join("t" if m.stride(-1) != 1 and m.stride(-2) == 1 and m.shape[-1] > 1 else "n" for m in matrices)


def _product(name: str, args: Any, _result: Any) -> tuple[str, list[Size]]:
    """aten::_grouped_mm is of one matrix's rows by several matrices; for their gradients it adds up over rows."""
    a, b = args[1:3] if name in ("aten::addmm", "aten::baddbmm") else args[:2]
    rows = a.shape[-2:-1] if name == "aten::_grouped_mm" else a.shape[:-1]
    return f"{name} {_layout(a, b)}", [Size.product(*rows), Size.product(b.shape[-1]), Size.product(a.shape[-1])]


def _convolution(name: str, args: Any, result: Any) -> tuple[str, list[Size]]:
    """A convolution as one product: a row for each output pixel, k the weights of one output channel."""
    weight, out = args[1], result
    rows = Size.product(out.shape[0], *out.shape[2:])
    return f"{name} nt", [rows, Size.product(weight.shape[0]), Size.product(*weight.shape[1:])]


def _convolution_backward(name: str, args: Any, _result: Any) -> tuple[str, list[Size]]:
    gradient, weight = args[0], args[2]
    rows = Size.product(gradient.shape[0], *gradient.shape[2:])
    return f"{name} tn", [Size.product(weight.shape[0]), Size.product(*weight.shape[1:]), rows]


def _attention(name: str, args: Any, _result: Any) -> tuple[str, list[Size]]:
    is_backward = name.endswith("_backward")
    query, key = args[1:3] if is_backward else args[:2]
    position = _CAUSAL_AT[name]
    is_causal = len(args) > position and args[position]
    dims = (*query.shape[:2], key.shape[1], query.shape[2], key.shape[2], query.shape[3], int(is_causal))
    # _flash_attention_backward (attention_backward.cu): output and gradient are made contiguous token by token.
    given = (args[0], args[4]) if is_backward and "flash" in name else ()
    num_copied = sum(not tensor.transpose(1, 2).is_contiguous() for tensor in given)
    return name, [Size.product(dim) for dim in (*dims, *([num_copied] if num_copied else []))]


def _flash_attn(name: str, args: Any, _result: Any) -> tuple[str, list[Size]]:
    """Dimensions of the flash-attn package's kernels. With a sliding window a query sees only as many keys."""
    query, key = args[1:3] if name.endswith("_backward") else args[:2]
    *_, is_causal, (left, right) = args
    keys = key.shape[1]
    if 0 <= left < keys:
        keys, is_causal = min(keys, left + 1 + (0 if is_causal else right)), False
    batch, length, heads, width = query.shape
    dims = batch, heads, key.shape[2], length, keys, width, int(is_causal)
    return name, [Size.product(dim) for dim in dims]


_CAUSAL_AT = {
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
}
"""The place of ``is_causal`` among the arguments."""


def _embedding(name: str, args: Any, _result: Any) -> tuple[str, list[Size]]:
    gradient, indices, rows = args[:3]
    is_copied = [] if gradient.is_contiguous() else [Size.product(1)]
    return name, [Size.product(*indices.shape), Size.product(rows), Size.product(gradient.shape[-1]), *is_copied]


def _rows(name: str, args: Any, _result: Any) -> tuple[str, list[Size]]:
    """Softmax over the last dimension."""
    return name, [Size.product(*args[0].shape[:-1]), Size.product(args[0].shape[-1])]


def _sum(name: str, args: Any, result: Any) -> tuple[str, list[Size]]:
    """A sum over all dimensions but the last ones, as a bias's gradient."""
    x = args[0]
    if not isinstance(result, Tensor) or not x.is_contiguous() or len(args) < 2 or not args[1]:
        return name, []
    summed = sorted(dim % x.dim() for dim in args[1])
    if summed != list(range(len(summed))) or len(summed) == x.dim():
        return name, []
    return name, [Size.product(*x.shape[: len(summed)]), Size.product(*x.shape[len(summed) :])]


_DIMS: dict[str, Callable[[str, Any, Any], tuple[str, list[Size]]]] = {
    "aten::mm": _product,
    "aten::addmm": _product,
    "aten::bmm": _product,
    "aten::baddbmm": _product,
    "aten::_grouped_mm": _product,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention,
    "flash_attn::flash_attn_func": _flash_attn,
    "flash_attn::flash_attn_func_backward": _flash_attn,
    "aten::embedding_dense_backward": _embedding,
    "aten::cat": _cat,
    "aten::sum": _sum,
    "aten::_safe_softmax": _rows,
}
