"""The implementations of operators that run: on a CPU or CUDA, seen by a dry run or not, on which GPU.

Memory that CUDA's kernels allocate beside their results is in kernel_workspaces.py. None of it was measured on a GPU of
ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from fsdp_bench.spec.hardware import FIRST_WITH_FLASH_ATTENTION, Gpu, cuda_version
from fsdp_bench.spec.setup import Precision

BOOL = 1
FP32 = 4
INT32 = 4
INT64 = 8


class Passing(NamedTuple):
    """Memory that a kernel allocates for itself and frees before it has allocated everything."""

    num_bytes: int
    lives_for: int
    """The number of allocations behind it that are made before it is freed."""


KernelScratch = Sequence[int | Passing]
"""A kernel's allocations beside its results, in order, in bytes; those not Passing are freed when it has all."""


class CrossEntropy(Enum):
    """On which logits a training script calls torch's cross-entropy (Loss.PLAIN)."""

    FP32_LOGITS = "torch.nn.functional.cross_entropy on logits that were cast to fp32"
    SAME_DTYPE = "torch.nn.functional.cross_entropy on the logits in the dtype in which they were computed"


def cublas_workspace(gpu: str | None) -> int:
    """Return cuBLAS's workspace of one thread and stream (aten/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).

    32 MiB on Hopper, else 8.125 MiB; 32 MiB with ROCm, 128 MiB on gfx94x and gfx95x (MI300, MI355).
    """
    if gpu is not None and gpu.startswith(("H100", "H20", "H800", "GH200")):
        return 4096 * 8 * 1024
    if gpu is not None and gpu.startswith(("MI300", "MI355")):
        return 1024 * 128 * 1024
    if gpu is not None and gpu.startswith("MI"):
        return 1024 * 32 * 1024
    return 4096 * 1024 * 2 + 16 * 1024 * 8


@dataclass(frozen=True)
class Kernels:
    """The implementations of operators that run."""

    name: str
    """``cuda`` or ``cpu``: where the operators run."""
    observed: bool
    """Whether a dispatch mode watches, as in a dry run and in a tracked CPU run: Python then holds a reference
    to every gradient, so that the engine never adds in place (can_accumulate_inplace wants a use count of one), and
    what operators allocate inside of themselves is not seen."""

    gloo: bool = False
    """Collectives by gloo, which reduces and scatters by an all-reduce on a copy of the whole message
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, _reduce_scatter_base)."""

    mesh: bool = False
    """A DeviceMesh's tensor of ranks is among what is seen: of real ranks and of one alone, not of a dry run."""

    cublas_workspace_bytes: int = 0
    """cuBLAS's workspace of one thread. There are two: of the main thread (forward) and of autograd's (backward). Each
    comes from the caching allocator with the thread's first matrix product, and stays."""

    num_multiprocessors: int = 108
    """An A100's, where no GPU is named."""

    threads_per_multiprocessor: int = 2048

    compute_capability: float = 8.0

    l2_bytes: int = 40 * 2**20
    """The L2 cache, of which Inductor allocates the size when it tunes kernels."""

    cudnn_attention: bool = False
    """Whether attention in 16 bits runs cuDNN's kernel, where that takes the head's size; else FlashAttention."""

    composite_norms: bool = False
    """RMSNorm as models wrote it before torch had one: elementary operators in fp32, also on CUDA."""

    cross_entropy: CrossEntropy = CrossEntropy.FP32_LOGITS

    metrics_on_logits: int = 0
    """Cross-entropies in fp32, without gradients, that a training loop computes after each backward, to log them. Its
    logits then live until the next forward has returned (composer/trainer/trainer.py, _eval_train_metrics)."""

    moves_model: bool = False
    """Whether other code than the benchmark's is built in host memory and moved to the GPU, as in trials and by the
    Trainer; else it is built on the meta device, as exported scripts do."""

    @property
    def tunes(self) -> bool:
        """Whether Inductor tunes kernels; a dry run does not run what it compiles."""
        return self.is_cuda and not self.observed

    @property
    def is_cuda(self) -> bool:
        """Fused RMSNorm, and keys expanded for fp32 attention (train/models/transformer.py, attention)."""
        return self.name == "cuda"

    @property
    def is_before_sm80(self) -> bool:
        """Whether the GPU has no FlashAttention (Gpu.is_before_sm80)."""
        return self.is_cuda and self.compute_capability < FIRST_WITH_FLASH_ATTENTION


CPU = Kernels("cpu", observed=True)
CPU_GLOO = Kernels("cpu", observed=True, gloo=True, mesh=True)
CPU_EMULATED = Kernels("cpu", observed=True, mesh=True)
"""Rank 0 of a world alone: real tensors, and no messages to copy."""
CUDA_OBSERVED = Kernels("cuda", observed=True)
CUDA = Kernels("cuda", observed=False, cublas_workspace_bytes=cublas_workspace(None))


def prefers_cudnn(gpu: Gpu) -> bool:
    """Whether torch runs cuDNN's attention in 16 bits, with cuDNN above 9.15: on sm90, sm100 and sm103.

    check_prefer_cudnn_attention in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13. Wheels of torch
    have such a cuDNN from 2.11 on (huggingface/transformers PR 48163), those for CUDA 12.6 not.
    """
    return gpu.compute_capability in (9.0, 10.0, 10.3)


FIRST_TORCH_WITH_CUDNN = 2, 11
_CUDA_WITH_NEW_CUDNN = (13, 0)


def runs_cudnn(gpu: Gpu) -> bool:
    """Whether it does with the cuDNN of its CUDA: for CUDA 12, most wheels of torch come with one before 9.15.1."""
    return prefers_cudnn(gpu) and (gpu.cuda is None or cuda_version(gpu.cuda) >= _CUDA_WITH_NEW_CUDNN)


def kernels_on(kernels: Kernels, gpu: Gpu | None, moves_model: bool = False, flash_alone: bool = False) -> Kernels:
    """Return the kernels as they are on a GPU of the catalogue, ``flash_alone``: with cuDNN's attention disabled."""
    if moves_model:
        kernels = replace(kernels, moves_model=True)
    if gpu is None or not kernels.cublas_workspace_bytes:
        return kernels
    return replace(
        kernels,
        cublas_workspace_bytes=cublas_workspace(gpu.name),
        num_multiprocessors=gpu.num_multiprocessors or kernels.num_multiprocessors,
        threads_per_multiprocessor=_THREADS.get(gpu.compute_capability or 0.0, kernels.threads_per_multiprocessor),
        compute_capability=gpu.compute_capability or kernels.compute_capability,
        l2_bytes=kernels.l2_bytes if gpu.l2_cache_mib is None else gpu.l2_cache_mib * 2**20,
        cudnn_attention=runs_cudnn(gpu) and not flash_alone,
    )


_THREADS = {7.5: 1024, 8.6: 1536, 8.7: 1536, 8.9: 1536, 12.0: 1536}
"""Threads per multiprocessor by compute capability, where not 2048 (CUDA C++ Programming Guide)."""


# -- The three dtypes of a setup as bytes an element, and which casts they mean ----------------------------------------

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def precision_of(weight_dtype: str, precision: Precision) -> Precision:
    """Return the dtypes of a parameter in a unit: the unit's, or of a frozen one that is stored apart its own alone.

    A wrapper casts to the compute dtype, which is that of the base's, or casts nothing (MixedPrecision is None).
    """
    if weight_dtype in ("", precision.store):
        return precision
    return Precision(weight_dtype, weight_dtype, weight_dtype)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one element of stored parameters, in compute, in gradient reduction."""

    store: int
    compute: int
    reduce: int
    casts: bool
    """The compute dtype is not the stored one."""
    reduces_in_other_dtype: bool
    """The reduction dtype is not the compute dtype."""
    casts_back: bool
    """The reduction dtype is not the stored one."""

    @classmethod
    def of(cls, precision: Precision) -> "Sizes":
        """Read a precision."""
        return cls(
            store=_BYTES[precision.store],
            compute=_BYTES[precision.compute],
            reduce=_BYTES[precision.reduce],
            casts=precision.compute != precision.store,
            reduces_in_other_dtype=precision.reduce != precision.compute,
            casts_back=precision.reduce != precision.store,
        )
