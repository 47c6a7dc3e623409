"""Memory of a GPU that is kept free of torch's caching allocator: for the CUDA context and NCCL's communicators.

One rule for every command. What is known is kept free: NCCL's buffers where they are derived from its source
(communicators.py), the CUDA context where a calibration measured it. For what is not known there is an assumption, and
whoever knows better states the whole (--headroom).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.units import GIB

ASSUMED_BYTES = 2 * GIB
"""For the CUDA context and NCCL together: the middle of the 1 to 3 GiB that users report between what torch reserves
and what nvidia-smi shows (issues of pytorch, OpenTau and Automodel)."""
ASSUMED_CONTEXT_BYTES = ASSUMED_BYTES - GIB // 2
"""For the context alone, where NCCL's part is derived: the same without 0.5 GiB, the least that is reported for one
communicator."""


@dataclass(frozen=True)
class Headroom:
    """Memory of one GPU that torch's allocator must leave free."""

    num_bytes: int
    source: str
    """What it is for and how it is known, as text."""
    is_assumed: bool
    """Whether some of it is an assumption."""


def headroom_of(gpu: Gpu | None, communicators: Communicators, stated_bytes: int | None = None) -> Headroom:
    """Return how much of a GPU is kept free.

    Args:
        gpu: the GPU; where a calibration measured its CUDA context, its usable memory is without that already.
        communicators: of one rank.
        stated_bytes: what the user says, for everything together; a measured context counts towards it.
    """
    context = gpu.context_bytes if gpu is not None else None
    if stated_bytes is not None:
        return Headroom(max(stated_bytes - (context or 0), 0), "as stated", False)
    nccl = communicators.num_bytes
    if nccl is None:
        left = ASSUMED_BYTES if context is None else max(ASSUMED_BYTES - context, 0)
        name = "CUDA context and NCCL" if context is None else "NCCL"
        return Headroom(left, f"for {name}: assumed", True)
    if context is None:
        beside = ", and NCCL's derived buffers" if nccl.high else ""
        return Headroom(ASSUMED_CONTEXT_BYTES + nccl.high, f"for the CUDA context: assumed{beside}", True)
    return Headroom(nccl.high, "NCCL's derived buffers" if nccl.high else "one GPU has no NCCL", False)
