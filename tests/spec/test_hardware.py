"""Versions of CUDA and the cuBLAS that comes with them."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog import loader
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import cuda_version


def test_an_older_cublas_holds_up_to_its_version() -> None:
    gpu = loader.gpu("H100-SXM")
    older = gpu.older_cublas
    for version, efficiency in (
        ("12.1", older.matmul_efficiency),
        ("12.4", older.matmul_efficiency),
        ("12.5", gpu.matmul_efficiency),
        ("13.0", gpu.matmul_efficiency),
    ):
        found = gpu.with_cuda(version)
        assert found.matmul_efficiency == efficiency
        assert found.has_older_cublas is (efficiency == older.matmul_efficiency)
    a100 = loader.gpu("A100-SXM-80GB")
    assert a100.with_cuda("11.7").matmul_efficiency == a100.matmul_efficiency


@pytest.mark.parametrize("text", ["", "12", "12.1.0", "cu121", "12.x", "-1.2"])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is no version of CUDA"):
        cuda_version(text)
