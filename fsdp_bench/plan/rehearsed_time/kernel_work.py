"""The bytes that a Triton kernel moves: Inductor's and Liger's are bound by memory; others are unknown."""

from __future__ import annotations

import math
import re

from fsdp_bench.plan.rehearsed_time.operator_work import Tensors
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.subprocesses.issued import TritonKernel

_MEMORY_BOUND = re.compile(r"triton_(poi|red|per|for|mix)_.*")
"""Inductor's pointwise kernels, reductions, and several of them in one. Its templates (triton_tem) are products."""


_LIGER = "liger_kernel.ops."
_LIGERS = {
    "liger_cross_entropy_kernel": {"X_ptr": 3},
    "element_mul_kernel": {"X_ptr": 2},
    "_triton_rope": {"q_ptr": 2, "k_ptr": 2},
    "_rms_norm_forward_kernel": {},
    "_rms_norm_backward_kernel": {},
    "_block_rms_norm_forward_kernel": {},
    "_block_rms_norm_backward_kernel": {},
    "_layer_norm_forward_kernel": {},
    "_layer_norm_backward_kernel": {},
    "_swiglu_forward_kernel": {},
    "_swiglu_forward_kernel_tiled": {},
    "_swiglu_backward_kernel": {"a_ptr": 2, "b_ptr": 2},
    "_swiglu_backward_kernel_tiled": {"a_ptr": 2, "b_ptr": 2},
    "_geglu_tanh_forward_kernel": {},
    "_geglu_tanh_backward_kernel": {"a": 2, "b": 2},
}
"""Kernels of Liger that are bound by memory, and how often they pass over a tensor: once unless this says more.

What is changed in place is read and written; cross entropy reads the logits twice: for their sum and their gradient.
"""


def work_of_kernel(kernel: TritonKernel, tensors: Tensors) -> Work | None:
    """Return a kernel's work: it reads its inputs, writes its outputs, and both of what it changes in place.

    It reads no more elements of an input than it has points: few of an embedding's weight. None if its time is not
    known.
    """
    is_ligers = kernel.module.startswith(_LIGER) and kernel.name in _LIGERS
    if not is_ligers and not (kernel.is_inductors and _MEMORY_BOUND.fullmatch(kernel.name)):
        return None
    passes = _LIGERS[kernel.name] if is_ligers else {name: 2 for name in kernel.changed if name.startswith("in_")}
    points = math.prod(kernel.sizes) if kernel.sizes else None
    total, itemsize = 0, 0
    for name, number in zip(kernel.names, kernel.arguments, strict=False):
        if number is None:
            continue
        tensor = tensors[number]
        itemsize = itemsize or tensor.itemsize
        own = math.prod(tensor.shape) * tensor.itemsize
        if points is not None and name.startswith("in_ptr"):
            own = min(own, points * tensor.itemsize)
        total += passes.get(name, 1) * own
    return Work(kernel.name, total, (), itemsize)
