"""What a kernel of Triton that Inductor wrote changes in place, and whether it is tuned."""

from __future__ import annotations

from torch._inductor.codecache import PyCodeCache

from tools.compiled.wrapper_code import TritonKernel


def read_kernel(name: str, source: str) -> TritonKernel:
    """Return what is to be known of a kernel.

    Those with several configurations are tuned: CachingAutotuner.run in torch/_inductor/runtime/triton_heuristics.py.

    Args:
        name: of the kernel.
        source: the module in which Inductor wrote it.
    """
    kernel = getattr(PyCodeCache.load(source), name)
    arguments = enumerate(kernel.fn.arg_names)
    changed = tuple(index for index, argument in arguments if argument in kernel.mutated_arg_names)
    return TritonKernel(changed, is_tuned=len(kernel.configs) > 1)
