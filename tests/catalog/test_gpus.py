"""gpus.toml: facts with sources, and each GPU found by what its buyers and its driver call it, where that is one."""

import re

import pytest

from fsdp_bench.catalog.loader import gpu, gpu_by_product_name, gpus, models, servers
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source, cuda_version
from tests.conftest import message_of

PROMISED = (
    "A10G L4 L40S V100-SXM2-16GB V100-SXM2-32GB A100-SXM-40GB A100-SXM-80GB H100-SXM H100-PCIe H100-SXM-96GB H200-SXM"
    " B200 RTX-4090 MI250X-GCD MI300X"
)


def test_every_gpu_that_was_promised_is_there() -> None:
    assert set(PROMISED.split()) <= {entry.name for entry in gpus()}


def test_every_fact_of_the_catalogue_has_a_source_with_a_date() -> None:
    for entry in (*gpus(), *servers(), *models()):
        found = [value for value in (getattr(entry, name) for name in entry.__struct_fields__) if value is not None]
        sources = [value if isinstance(value, Source) else getattr(value, "source", None) for value in found]
        assert entry.source in sources
        for source in filter(None, sources):
            assert source.title, entry.name
            assert re.match(r"^\d{4}(-\d\d){0,2}$", source.date), entry.name
    for card in gpus():
        assert (card.usable_memory_bytes is None) == (card.usable_memory_source is None), card.name


def test_peaks_are_positive_and_of_known_dtypes_and_names_are_unique() -> None:
    assert len(gpus()) > 20
    for entry in gpus():
        assert all(value > 0 for value in entry.dense_flops_per_second.values())
        assert set(entry.dense_flops_per_second) <= {"fp8", "bf16", "fp16", "tf32", "fp32"}
        assert ("bf16" in entry.dense_flops_per_second) == entry.native_bf16, entry.name
    for names in ([e.name for e in gpus()], [product for e in gpus() for product in e.product_names]):
        assert len(set(names)) == len(names)


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


def test_what_is_unknown_or_not_documented_is_none_and_never_the_nearest() -> None:
    assert gpu_by_product_name("NVIDIA H100 80GB") is None
    assert gpu_by_product_name("NVIDIA A10") is not gpu_by_product_name("NVIDIA A10G")
    assert gpu("GH200-96GB").usable_memory_bytes is None
    volta = gpu("V100-SXM2-16GB")
    assert volta.peak_flops_per_second("bf16") is None
    with pytest.raises(SpecError, match="dtype"):
        volta.peak_flops_per_second("int8")


def test_a_process_can_use_a_little_less_than_nvml_shows() -> None:
    # What the driver keeps was between 0.2 and 1.1 GiB in every public report that shows both.
    for card in gpus():
        if card.usable_memory_bytes is not None and card.nvml_total_bytes is not None:
            kept = card.nvml_total_bytes - card.usable_memory_bytes
            assert 0.2 * 2**30 < kept < 1.1 * 2**30, card.name


def test_an_older_cublas_holds_up_to_its_version() -> None:
    new, a100 = gpu("H100-SXM"), gpu("A100-SXM-80GB")
    for version, is_older in (("12.1", True), ("12.4", True), ("12.5", False), ("13.0", False)):
        found = new.with_cuda(version)
        assert found.matmul_efficiency == (new.older_cublas if is_older else new).matmul_efficiency
        assert found.has_older_cublas is is_older
    assert a100.with_cuda("11.7").matmul_efficiency == a100.matmul_efficiency


@pytest.mark.parametrize("text", ["", "12", "12.1.0", "cu121", "12.x", "-1.2"])
def test_text_that_is_no_version_of_cuda_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is no version of CUDA"):
        cuda_version(text)


MEANT = {
    "h100-sxm": "H100-SXM",
    "H100 SXM 80 GB": "H100-SXM",
    "H100-SXM-80GB": "H100-SXM",
    "h100 pcie": "H100-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-SXM",  # what nvidia-smi prints
    "H200": "H200-SXM",
    "A100-SXM4-80GB": "A100-SXM-80GB",
    "a100 80gb pcie": "A100-PCIe-80GB",
    "rtx4090": "RTX-4090",
    "GeForce RTX 3090": "RTX-3090",
    "Tesla T4": "T4",
    "NVIDIA H800": "H800-SXM",
    "GeForce RTX 3080": "RTX-3080",
}


@pytest.mark.parametrize("written", MEANT)
def test_a_name_that_can_mean_one_gpu_is_that_gpu(written: str) -> None:
    assert gpu(written).name == MEANT[written]


@pytest.mark.parametrize("written", ["lower", "upper", "swapcase"])
def test_every_gpu_answers_to_its_own_and_its_drivers_names_in_any_case(written: str) -> None:
    for entry in gpus():
        for name in (entry.name, *entry.product_names):
            assert gpu(getattr(name, written)()) is entry


OTHERS = "; `fsdp-bench servers` lists what is there, and --catalog FILE adds a GPU"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("H100", " could be H100-SXM, H100-PCIe, H100-NVL or H100-SXM-96GB; name one"),
        ("H100 80GB", " could be H100-SXM or H100-PCIe; name one"),
        ("A100 80GB", " could be A100-SXM-80GB or A100-PCIe-80GB; name one"),
        ("H100 40GB", " is not in the catalogue; of that kind there are H100-SXM, H100-PCIe, H100-NVL, H100-SXM-96GB"),
        ("H100-SMX", " is not in the catalogue (did you mean 'H100-SXM'?)"),
        ("", f" is not in the catalogue{OTHERS}"),
        ("RXT-4090", f" is not in the catalogue (did you mean 'RTX-4090'?){OTHERS}"),
        # Another number is another GPU, which is not proposed.
        *(
            (name, f" is not in the catalogue{OTHERS}")
            for name in ("A30", "A16", "GB300", "B100", "RTX-409", "RTX 5070", "MI325X", "H2", "L20")
        ),
    ],
)
def test_a_name_that_can_mean_several_or_none_says_which_there_are(written: str, said: str) -> None:
    assert message_of(lambda: gpu(written)) == f"gpu: {written!r}{said}"
