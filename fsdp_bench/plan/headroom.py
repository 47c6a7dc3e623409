"""Headroom: GPU memory that torch's caching allocator must leave free for the CUDA context and NCCL's communicators.

All commands use this rule. NCCL's buffers are derived from its source (rates/communicators.py). The CUDA context is
measured by a calibration. Whatever is unknown is assumed. --headroom replaces the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_bench.rates.communicators import Communicators
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.units import GIB

ASSUMED_BYTES = 2 * GIB
"""Assumed for the CUDA context and NCCL together: the middle of the 1 to 3 GiB that users report between what torch
reserves and what nvidia-smi shows (issues of pytorch, OpenTau and Automodel)."""
ASSUMED_CONTEXT_BYTES = ASSUMED_BYTES - GIB // 2
"""Assumed for the CUDA context alone, if NCCL's part is derived: ASSUMED_BYTES less 0.5 GiB, the least that is reported
for one communicator."""
_ASSUMED = "for CUDA and NCCL (an assumption; users see 1 to 3 GiB)"
_CONTEXT_ASSUMED = "for CUDA (an assumption)"
_NCCL_ASSUMED = "for NCCL (an assumption; users see 1 to 3 GiB for CUDA and NCCL)"


@dataclass(frozen=True)
class Headroom:
    """Memory of one GPU that torch's allocator must leave free."""

    num_bytes: int
    source: str
    """The purpose of the headroom and how its size is known, as text."""


def headroom_of(gpu: Gpu | None, communicators: Communicators, stated_bytes: int | None = None) -> Headroom:
    """Return the memory of a GPU that is kept free.

    Args:
        gpu: the GPU. If a calibration measured its CUDA context, that is already subtracted from its usable memory.
        communicators: the communicators of one rank.
        stated_bytes: --headroom, for everything together. A measured context counts towards it.
    """
    context = gpu.context_bytes if gpu is not None else None
    if stated_bytes is not None:
        return Headroom(max(stated_bytes - (context or 0), 0), "as stated")
    nccl = communicators.num_bytes
    if nccl is None:
        left = ASSUMED_BYTES if context is None else max(ASSUMED_BYTES - context, 0)
        return Headroom(left, _ASSUMED if context is None else _NCCL_ASSUMED)
    if context is None:
        return Headroom(ASSUMED_CONTEXT_BYTES + nccl.high, _ASSUMED if nccl.high else _CONTEXT_ASSUMED)
    return Headroom(nccl.high, "NCCL's derived buffers" if nccl.high else "one GPU has no NCCL")
