"""A GPU is found by whatever its buyers call it, where that means one alone; else what it could be is named."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.loader import gpu, gpus, model
from tests.conftest import message_of


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100-sxm", "H100-SXM"),
        ("H100 SXM 80 GB", "H100-SXM"),
        ("H100-SXM-80GB", "H100-SXM"),
        ("h100 pcie", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),  # what nvidia-smi prints
        ("H200", "H200-SXM"),
        ("A100-SXM4-80GB", "A100-SXM-80GB"),
        ("a100 80gb pcie", "A100-PCIe-80GB"),
        ("A10", "A10"),
        ("rtx4090", "RTX-4090"),
        ("GeForce RTX 3090", "RTX-3090"),
        ("Tesla T4", "T4"),
        ("A40", "A40"),
        ("L40", "L40"),
        ("H20", "H20"),
        ("NVIDIA H800", "H800-SXM"),
        ("GeForce RTX 3080", "RTX-3080"),
    ],
)
def test_a_name_that_can_mean_one_gpu_is_that_gpu(written: str, name: str) -> None:
    assert gpu(written).name == name


@pytest.mark.parametrize("written", ["lower", "upper", "swapcase"])
def test_every_gpu_answers_to_its_own_and_its_drivers_names_in_any_case(written: str) -> None:
    for entry in gpus():
        for name in (entry.name, *entry.product_names):
            assert gpu(getattr(name, written)()) is entry


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("H100", "gpu: 'H100' could be H100-SXM, H100-PCIe, H100-NVL or H100-SXM-96GB; name one"),
        ("H100 80GB", "gpu: 'H100 80GB' could be H100-SXM or H100-PCIe; name one"),
        ("A100 80GB", "gpu: 'A100 80GB' could be A100-SXM-80GB or A100-PCIe-80GB; name one"),
        (
            "H100 40GB",
            "gpu: 'H100 40GB' is not in the catalogue; of that kind there are H100-SXM, H100-PCIe, H100-NVL,"
            " H100-SXM-96GB",
        ),
        ("H100-SMX", "gpu: 'H100-SMX' is not in the catalogue (did you mean 'H100-SXM'?)"),
        (
            "",
            "gpu: '' is not in the catalogue; `fsdp-bench servers` lists what is there, and --catalog FILE adds a GPU",
        ),
        (
            "RXT-4090",
            "gpu: 'RXT-4090' is not in the catalogue (did you mean 'RTX-4090'?); `fsdp-bench servers` lists"
            " what is there, and --catalog FILE adds a GPU",
        ),
    ],
)
def test_a_name_that_can_mean_several_or_none_says_which_there_are(written: str, said: str) -> None:
    assert message_of(lambda: gpu(written)) == said


@pytest.mark.parametrize("written", ["A30", "A16", "GB300", "B100", "RTX-409", "RTX 5070", "MI325X", "H2", "L20"])
def test_another_number_is_another_gpu_and_the_catalogue_option_is_named_instead(written: str) -> None:
    message = message_of(lambda: gpu(written))
    assert "did you mean" not in message
    assert message.endswith("lists what is there, and --catalog FILE adds a GPU")


def test_a_model_is_found_without_its_dashes() -> None:
    assert model("llama 3.1 8b") is model("Llama-3.1-8B")
