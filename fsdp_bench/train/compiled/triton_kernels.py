"""What Inductor will do with a kernel of Triton before it first runs."""

from __future__ import annotations

from torch._inductor.codecache import PyCodeCache


def in_place_where_tuned(name: str, source: str) -> tuple[int, ...] | None:
    """Return the positions of the arguments that a kernel changes in place; None where it has one configuration.

    Those with more are tuned: CachingAutotuner.run in torch/_inductor/runtime/triton_heuristics.py.

    Args:
        name: of the kernel.
        source: the module in which Inductor wrote it.
    """
    kernel = getattr(PyCodeCache.load(source), name)
    if len(kernel.configs) == 1:
        return None
    return tuple(index for index, argument in enumerate(kernel.fn.arg_names) if argument in kernel.mutated_arg_names)
