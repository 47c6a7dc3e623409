"""The catalogue: complete where it speaks, sourced, and found by the name that the driver reports."""

from __future__ import annotations

import re

import pytest

from fsdp_bench.catalog.loader import gpu_by_product_name, gpus
from fsdp_bench.spec.errors import SpecError


def test_every_gpu_has_a_source_with_a_date_and_only_positive_facts() -> None:
    assert len(gpus()) > 20
    for entry in gpus():
        assert entry.source.title
        assert re.match(r"^\d{4}(-\d\d){0,2}$", entry.source.date), entry.name
        assert all(value > 0 for value in entry.dense_flops_per_second.values())
        assert set(entry.dense_flops_per_second) <= {"fp8", "bf16", "fp16", "tf32", "fp32"}
        assert ("bf16" in entry.dense_flops_per_second) == entry.native_bf16, entry.name


def test_names_are_unique() -> None:
    names = [entry.name for entry in gpus()]
    products = [product for entry in gpus() for product in entry.product_names]
    assert len(set(names)) == len(names)
    assert len(set(products)) == len(products)


@pytest.mark.parametrize(
    ("product", "dtype", "peak"),
    [
        # Datasheets' dense values (half of those printed with sparsity): H100 SXM 1,979/2, A100 312, H200 as H100.
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        # Of the GB200 NVL72's 360 PFLOP/s with sparsity one of 72, of the HGX B300's 36 one of 8, halved.
        ("NVIDIA GB200", "bf16", 360e15 / 72 / 2),
        ("NVIDIA B300 SXM6 AC", "bf16", 36e15 / 8 / 2),
        # Multiprocessors x clock x FLOPs of a multiprocessor and clock, which the whitepapers of each chip print.
        ("NVIDIA A40", "bf16", 84 * 1.74e9 * 1024),
        ("NVIDIA GeForce RTX 4080", "bf16", 76 * 2.505e9 * 512),
        ("NVIDIA GeForce RTX 5090", "bf16", 170 * 2.407e9 * 512),
        ("AMD Instinct MI355X", "bf16", 256 * 2.4e9 * 4096),
        ("NVIDIA H800", "bf16", 989.4e12),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA L40", "bf16", 181.05e12),
    ],
)
def test_peaks_of_well_known_gpus(product: str, dtype: str, peak: float) -> None:
    found = gpu_by_product_name(product)
    assert found.peak_flops_per_second(dtype) == pytest.approx(peak, rel=0.002)


def test_an_unknown_gpu_is_unknown_and_never_the_nearest() -> None:
    assert gpu_by_product_name("NVIDIA H100 80GB") is None
    assert gpu_by_product_name("NVIDIA A10") is not gpu_by_product_name("NVIDIA A10G")


def test_a_volta_has_no_bf16_peak_and_no_gpu_one_of_a_dtype_without_a_meaning() -> None:
    volta = next(entry for entry in gpus() if entry.name.startswith("V100"))
    assert volta.peak_flops_per_second("bf16") is None
    with pytest.raises(SpecError, match="dtype"):
        volta.peak_flops_per_second("int8")
