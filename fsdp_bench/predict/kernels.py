"""Which implementations of operators run, and what CUDA's allocate inside of themselves.

The CUDA figures are read from PyTorch's source (aten/src/ATen, main between 2.10 and 2.13) and have not been compared
with a card yet. Not modelled, because small or not documented: partial sums of norms' weight gradients, the workspace
of memory-efficient attention's backward, flash attention's split-KV buffers for few tokens, sorting's scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_bench.spec.hardware import Gpu

FP32 = 4
INT64 = 8


@dataclass(frozen=True)
class Kernels:
    """Which implementations run."""

    name: str
    """``cuda`` or ``cpu``: where the operators run."""
    observed: bool
    """As a dispatch mode sees it, which is part of a dry run and of a tracked CPU run: Python then holds a reference
    to every gradient, so that the engine never adds in place (can_accumulate_inplace wants a use count of one), and
    what operators allocate inside of themselves is not seen."""

    gloo: bool = False
    """Collectives by gloo, which reduces and scatters by an all-reduce on a copy of the whole message
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, _reduce_scatter_base)."""

    mesh: bool = False
    """A DeviceMesh's tensor of ranks is among what is seen: of real ranks and of one alone, not of a dry run."""

    cublas_workspace_bytes: int = 0
    """Of one thread; there are two: one runs forward, and autograd's device thread backward. It comes from the caching
    allocator with a thread's first product, and stays."""

    composite_norms: bool = False
    """RMSNorm as models wrote it before torch had one: elementary operators in fp32, also on CUDA."""

    @property
    def is_cuda(self) -> bool:
        """Fused RMSNorm, and keys expanded for fp32 attention (train/transformer.py, attention)."""
        return self.name == "cuda"


CPU = Kernels("cpu", observed=True)
CPU_GLOO = Kernels("cpu", observed=True, gloo=True, mesh=True)
CPU_EMULATED = Kernels("cpu", observed=True, mesh=True)
"""Rank 0 of a world alone: real tensors, and no messages to copy."""
CUDA_OBSERVED = Kernels("cuda", observed=True)


def flash_backward_workspace(batch: int, heads: int, groups: int, length: int, head_dim: int) -> list[int]:
    """Return what flash attention 2's backward allocates beside its results, in bytes for 16-bit inputs.

    pytorch_flash::mha_bwd (aten/native/transformers/cuda/flash_attn/flash_api.cpp): softmax_d and dq_accum in fp32,
    with the sequence rounded to 128 and the head to 32 (to 256 above 192), and with grouped keys their expanded
    gradients.
    """
    rounded_length = -(-length // 128) * 128
    rounded_dim = -(-head_dim // 32) * 32 if head_dim <= 192 else 256
    softmax_d = batch * heads * rounded_length * FP32
    sizes = [softmax_d, softmax_d * rounded_dim]
    if groups > 1:
        sizes += [batch * length * heads * head_dim * 2] * 2
    return sizes


def embedding_backward_workspace(num_indices: int, rows: int, width: int) -> list[int]:
    """Return what aten::embedding_dense_backward allocates beside its result.

    aten/native/cuda/Embedding.cu sorts above 3072 indices; EmbeddingBackwardKernel.cu then sums runs of ten indices
    in fp32 (NROWS_PER_THREAD, max_partial_segment).
    """
    if num_indices <= 3072:
        return []
    segments = min(num_indices, rows)
    partial = num_indices // 10 + segments
    indices = [num_indices * INT64] * 3 + [segments * INT64] * 2 + [partial * INT64]
    return [*indices, partial * width * FP32]


def cublas_workspace(gpu: str | None) -> int:
    """Return cuBLAS's workspace of one thread and stream (aten/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize).

    32 MiB on Hopper, else 8.125 MiB; 32 MiB with ROCm, 128 MiB on gfx94x (MI300).
    """
    if gpu is not None and gpu.startswith(("H100", "H200", "GH200")):
        return 4096 * 8 * 1024
    if gpu is not None and gpu.startswith("MI300"):
        return 1024 * 128 * 1024
    if gpu is not None and gpu.startswith("MI"):
        return 1024 * 32 * 1024
    return 4096 * 1024 * 2 + 16 * 1024 * 8


CUDA = Kernels("cuda", observed=False, cublas_workspace_bytes=cublas_workspace(None))


def prefers_cudnn(gpu: Gpu) -> bool:
    """Whether torch runs cuDNN's attention in 16 bits, with cuDNN above 9.15: on sm90 and sm100.

    check_prefer_cudnn_attention in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13.
    """
    return gpu.compute_capability in (9.0, 10.0)


def kernels_on(kernels: Kernels, gpu: str | None) -> Kernels:
    """Return the kernels with the cuBLAS workspace of a GPU of the catalogue."""
    if gpu is None or not kernels.cublas_workspace_bytes:
        return kernels
    return replace(kernels, cublas_workspace_bytes=cublas_workspace(gpu))
