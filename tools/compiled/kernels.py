"""The operators that Inductor calls as they are: what they allocate, and the sizes that decide what they compute."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_FP32, _FP32_ROWS = 4, 32


class View(NamedTuple):
    """A tensor as compiled code sees it."""

    storage: int
    shape: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] = ()
    storage_bytes: int = 0


class Kernel(NamedTuple):
    """A name, and the sizes that its time and its workspace depend on (train/recording/operators.py)."""

    name: str
    dims: tuple[int, ...]


Outputs = dict[int, tuple[tuple[int, ...], int]]
"""Shape and bytes of an element of each output that is on the device."""


def _flash(inputs: Sequence[View]) -> Outputs:
    q = inputs[0]
    return {0: (q.shape, q.itemsize), 1: (q.shape[:3], _FP32), 6: ((2,), 8), 7: ((), 8)}


def _efficient(inputs: Sequence[View]) -> Outputs:
    """The logarithms of sums are rounded up to 32 rows (aten/native/transformers/cuda/attention.cu)."""
    batch, heads, length, _ = inputs[0].shape
    return {0: (inputs[0].shape, inputs[0].itemsize), 1: ((batch, heads, -(-length // _FP32_ROWS) * _FP32_ROWS), _FP32)}


def _gradients(inputs: Sequence[View]) -> Outputs:
    """dq, dk, dv; the first argument is the gradient of the output."""
    return {index: (inputs[index + 1].shape, inputs[index + 1].itemsize) for index in range(3)}


def _attention(inputs: Sequence[View]) -> tuple[int, ...]:
    (batch, heads, length, head_dim), (_, groups, keys, _) = inputs[0].shape, inputs[1].shape
    return batch, heads, groups, length, keys, head_dim, 1


def _attention_backward(inputs: Sequence[View]) -> tuple[int, ...]:
    return _attention(inputs[1:])


def _product(inputs: Sequence[View]) -> tuple[int, ...]:
    (m, k), (_, n) = inputs[-2].shape, inputs[-1].shape
    return m, n, k


def _scaled_product(inputs: Sequence[View]) -> tuple[int, ...]:
    """The factors come before their scales."""
    return _product(inputs[:2])


MAKES: dict[str, Callable[[Sequence[View]], Outputs]] = {
    "aten._scaled_dot_product_flash_attention": _flash,
    "aten._scaled_dot_product_flash_attention_backward": _gradients,
    "aten._scaled_dot_product_efficient_attention": _efficient,
    "aten._scaled_dot_product_efficient_attention_backward": _gradients,
}
"""The outputs of an operator, by its name, from its inputs."""

KERNEL_READERS: dict[str, Callable[[Sequence[View]], tuple[int, ...]]] = {
    "aten.mm": _product,
    "aten.addmm": _product,
    "aten._scaled_mm": _scaled_product,
    "aten._scaled_dot_product_flash_attention": _attention,
    "aten._scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten._scaled_dot_product_efficient_attention": _attention,
    "aten._scaled_dot_product_efficient_attention_backward": _attention_backward,
}
"""The sizes that decide what an operator computes."""
