"""The outcome of a rank's exception: out of GPU memory, out of host memory, or a crash.

sweep/run/outcome.py decides a trial's outcome from the outcomes of all its ranks.
"""

from __future__ import annotations

import time

import torch

from fsdp_bench.spec.rank_report import Failure, Outcome
from fsdp_bench.train.measuring.storage_tracker import BudgetExceeded

_OUT_OF_DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Error messages of torch's allocator, the CUDA driver (which loads kernels lazily), NCCL, cuBLAS, cuDNN."""


def classify(error: BaseException, phase: str) -> tuple[Outcome, Failure]:
    """Return the outcome and the failure of a rank that ended with an exception.

    ``oom_gpu`` where the device's memory ran out, ``oom_host`` where the host's memory or a CPU's memory_limit ran out,
    else ``crashed``.

    Args:
        error: the exception.
        phase: the phase of the step, or the stage of the trial, in which it was raised.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    message, summary = f"{type(error).__name__}: {text[:400]}", None
    if isinstance(error, torch.OutOfMemoryError) or any(known in text for known in _OUT_OF_DEVICE_MEMORY):
        if torch.cuda.is_initialized():
            summary = torch.cuda.memory_summary(abbreviated=True)
        outcome, limit = Outcome.OOM_GPU, "device"
    elif isinstance(error, BudgetExceeded):
        outcome, limit = Outcome.OOM_HOST, "budget"
    elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "std::bad_alloc" in text:
        outcome, limit = Outcome.OOM_HOST, "host"
    else:
        outcome, limit = Outcome.CRASHED, None
    return outcome, Failure(message=message, phase=phase, at=time.time(), limit=limit, allocator_summary=summary)
