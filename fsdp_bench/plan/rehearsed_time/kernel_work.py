"""What a kernel of Triton moves. What torch.compile's Inductor wrote is bound by memory; of others nobody knows."""

from __future__ import annotations

import math
import re

from fsdp_bench.plan.rehearsed_time.operator_work import Tensors
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.subprocesses.issued import TritonKernel

_MEMORY_BOUND = re.compile(r"triton_(poi|red|per|for|mix)_.*")
"""Inductor's pointwise kernels, reductions, and several of them in one. Its templates (triton_tem) are products."""


def work_of_kernel(kernel: TritonKernel, tensors: Tensors) -> Work | None:
    """Return a kernel's work: it reads its inputs, writes its outputs, and both of what it changes in place.

    Of an input no more elements are read than the kernel has points, as of an embedding's weight. None if its time is
    not known.
    """
    if not (kernel.is_inductors and _MEMORY_BOUND.fullmatch(kernel.name)):
        return None
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
        total += 2 * own if name in kernel.changed and name.startswith("in_") else own
    return Work(kernel.name, total, (), itemsize)
