"""The stand-in, compiled once for each version of CUDA."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fsdp_bench.rehearse.build import compile_stand_in
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu

NEWEST = {"cudaMalloc", "cudaNewestFunction", "cublasNewestFunction"}
"""Functions that a future torch uses: one that the stand-in has, and two that it does not have."""


def gpu_of(capability: float, product_name: str = "NVIDIA A100-SXM4-80GB") -> RehearsedGpu:
    """Return a GPU of 80 GiB, of which half a GiB is kept free, with 108 multiprocessors."""
    return RehearsedGpu(
        name="one",
        product_name=product_name,
        usable_bytes=80 << 30,
        kept_free_bytes=1 << 29,
        compute_capability=capability,
        num_multiprocessors=108,
    )


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function that compiles the stand-in for a version of CUDA, once, and returns its folder."""

    @cache
    def compiled_for(cuda_version: int) -> Path:
        folder = tmp_path_factory.mktemp("stand-in")
        compile_stand_in(folder, cuda_version, NEWEST, f"cuda-{cuda_version}")
        return folder

    return compiled_for
