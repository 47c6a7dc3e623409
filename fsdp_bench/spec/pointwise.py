"""The kernel that PyTorch launches for a pointwise operator: one that reads vectors, or a slower one.

A kernel reads 16 bytes at once only where all its tensors lie in memory alike (gpu_kernel_impl in
aten/native/cuda/CUDALoops.cuh). Otherwise each element's place is computed by integer divisions (elementwise_kernel
with an OffsetCalculator), or each element is loaded by a switch over dtypes (unrolled_elementwise_kernel).
"""

from collections.abc import Sequence

import msgspec

STRIDED = "strided"
"""Tensors are broadcast, or lie in memory differently."""
CASTING = "casting"
"""A tensor has another dtype than the operator computes in."""


class Operand(msgspec.Struct, frozen=True):
    """A tensor that a pointwise operator reads or writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def path_of(name: str, read: Sequence[Operand], written: Operand) -> str:
    """Return ``strided``, ``casting``, both with a space between, or nothing where a pointwise kernel reads vectors.

    ``name`` is the dispatcher's, ``aten::mul``; ``read`` are the tensors that are not only overwritten.
    """
    operands = [*read, written]
    first = _extent(written)
    is_strided = any(_extent(one) != first for one in operands) or not _is_dense(*first)
    return " ".join([STRIDED] * is_strided + [CASTING] * _casts(name, read, written))


def copy_path(itemsize: int, into: int) -> str:
    """Return the path of a contiguous copy between dtypes of so many bytes, float32 and 16 bits."""
    return CASTING if itemsize < into else ""


def is_strided_cat(read: Sequence[Operand], written: Operand, itemsize: int) -> bool:
    """Whether aten::cat copies element by element: no vectors of 16 bytes (CatArrayBatchedCopy in cuda/Shape.cu)."""
    if not all(_is_dense(*_extent(one), in_order=True) for one in read):
        return True
    changed = [axis for axis, size in enumerate(written.shape) if any(one.shape[axis] != size for one in read)]
    inner = written.strides[changed[0]] if changed else 1
    return any(one.shape[changed[0]] * inner * itemsize % 16 for one in read if changed)


def _extent(operand: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides without dimensions of one element (TensorIterator coalesces them away)."""
    kept = [pair for pair in zip(operand.shape, operand.strides, strict=True) if pair[0] != 1]
    return tuple(size for size, _ in kept), tuple(stride for _, stride in kept)


def _is_dense(sizes: tuple[int, ...], strides: tuple[int, ...], in_order: bool = False) -> bool:
    """Whether elements fill their memory without gaps or overlaps; ``in_order``: in the order of the dimensions."""
    expected = 1
    pairs = list(zip(strides, sizes, strict=True))
    for stride, size in reversed(pairs) if in_order else sorted(pairs):
        if stride != expected:
            return False
        expected *= size
    return True


_HALVES = ("bfloat16", "float16")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone")
"""Operators that are kernels of this kind and are not tagged ``pointwise`` in PyTorch."""


def _casts(name: str, read: Sequence[Operand], written: Operand) -> bool:
    """Whether elements are cast as they are loaded or stored.

    float32 to 16 bits has a kernel of its own, which need not (bfloat16_copy_kernel_cuda in aten/native/cuda/Copy.cu).
    Masks stay bool, and comparisons return it.
    """
    computed = {one.dtype for one in (*read, written)} - {"bool"}
    if name in COPIES and [one.dtype for one in read] == ["float32"] and written.dtype in _HALVES:
        return False
    return len(computed) > 1 and written.dtype != "bool"
