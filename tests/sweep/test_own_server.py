"""``doctor --as-catalog``: this machine as entries of the catalogue, on a machine whose NVML is a fake."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.loader import Catalog, load_user_catalog
from fsdp_bench.cli.doctor import command
from fsdp_bench.spec.calibration_profile import CopyTime, MatmulTime, OperatorTime, write_profile
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import LinkKind
from fsdp_bench.spec.units import GIB, MIB
from fsdp_bench.sweep import diagnosis
from tests.conftest import json_of, refused
from tests.rates.test_calibrated import profile

H100 = "NVIDIA H100 80GB HBM3"
CONTEXT = 600 * MIB
USABLE = 79 * GIB


class FakeNvml(SimpleNamespace):
    """NVML with some GPUs of the given names; a function that is not here raises NVMLError."""

    class NVMLError(Exception):
        """As pynvml's."""

    NVML_NVLINK_MAX_LINKS = 36
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_NVLINK_DEVICE_TYPE_GPU = 0

    def __init__(self, names: list[str], num_nvlinks: int = 18) -> None:
        super().__init__(names=names, num_nvlinks=num_nvlinks)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answers = {
            "nvmlDeviceGetCount": lambda: len(self.names),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: self.names[index],
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * GIB),
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [],
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetTopologyCommonAncestor": lambda *_: 50,
            "nvmlDeviceGetNvLinkState": lambda _, link: int(link < self.num_nvlinks),
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda *_: self.NVML_NVLINK_DEVICE_TYPE_SWITCH,
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
        }
        return answers[name]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this a machine with the named GPUs, which torch sees, or without torch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def become(*names: str, has_torch: bool = True, **nvml: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(list(names), **nvml))
        seen = {
            "total_memory_bytes": USABLE,
            "native_bf16": True,
            "num_multiprocessors": 132,
            "l2_cache_bytes": 50 * MIB,
        }
        facts = {"torch": "2.13.0", "cuda_available": True, "gpus": [{"name": name, **seen} for name in names]}
        monkeypatch.setattr(diagnosis, "_ask_torch", lambda: (facts, None) if has_torch else (None, "no torch"))

    return become


def printed(folder: Path, *words: object) -> tuple[str, Catalog]:
    """Return what the command prints, and the catalogue that reads it."""
    done = CliRunner().invoke(
        command, ["--as-catalog", *map(str, words)], catch_exceptions=False, standalone_mode=False
    )
    (folder / "mine.toml").write_text(done.stdout)
    return done.stdout, load_user_catalog(folder / "mine.toml")


predicted = partial(json_of, "predict", "--model", "Llama-3.1-8B", "--server")


def calibration(folder: Path, name: str) -> Path:
    """Write a calibration by hand: 500 TFLOP/s in bf16, 2.9 TB/s copied, 25 GB/s to the device."""
    times = (("bf16", 2e12 / 500e12), ("fp32", 1e-4))
    made = profile(
        matmul=tuple(
            MatmulTime(layout="nt", dtype=dtype, m=10**4, n=10**4, k=10**4, seconds=seconds) for dtype, seconds in times
        ),
        operator=(OperatorTime(operator="aten::copy_", dtype="fp32", num_bytes=29 * 10**8, seconds=1e-3),),
        copy=(CopyTime(direction="to_device", num_bytes=25 * 10**6, seconds=1e-3),),
    )
    ranks = (replace(made.ranks[0], num_ranks=8, context_bytes=CONTEXT),)
    write_profile(replace(made, device="cuda", device_name=name, ranks=ranks), folder / "card.toml")
    return folder / "card.toml"


def test_a_known_gpu_is_predicted_as_in_the_catalogue_with_the_memory_that_torch_reports(
    machine: Any, tmp_path: Path
) -> None:
    machine(*[H100] * 8)
    text, catalog = printed(tmp_path)
    gpu, server = catalog.gpu("H100-SXM"), catalog.server("8xH100-80GB-HBM3")
    assert gpu.dense_flops_per_second == loader.gpu("H100-SXM").dense_flops_per_second
    assert (gpu.usable_memory_bytes, gpu.nvml_total_bytes) == (USABLE, 80 * GIB)
    assert (server.gpu, server.gpus_per_node) == ("H100-SXM", 8)
    assert "# power_watts = " in text
    assert "# [server.inter_node] " in text
    # As NVIDIA documents the links of eight such GPUs.
    mine = predicted("8xH100-80GB-HBM3", "--catalog", tmp_path / "mine.toml")
    theirs = predicted("DGX-H100")
    assert mine["time"]["step_seconds"] == theirs["time"]["step_seconds"] is not None
    assert mine["server"]["gpu_memory_bytes"] == USABLE != theirs["server"]["gpu_memory_bytes"]


def test_the_commented_fields_can_be_filled_in(machine: Any, tmp_path: Path) -> None:
    """With every hint's # taken away the file is a whole one: its examples are of an H100."""
    machine("NVIDIA X99", "NVIDIA X99", has_torch=False)
    text, catalog = printed(tmp_path)
    assert catalog.gpu("X99").usable_memory_bytes is None
    head, rest = text.split("[[gpu]]")
    filled = "\n".join(line.removeprefix("# ") for line in rest.splitlines())
    (tmp_path / "filled.toml").write_text(f"{head}[[gpu]]{filled}")
    whole = load_user_catalog(tmp_path / "filled.toml")
    gpu, server = whole.gpu("X99"), whole.server("2xX99")
    assert gpu.peak_flops_per_second("bf16") == 989.4e12
    assert (server.power_watts, getattr(server.inter_node, "kind")) == (10200, LinkKind.INFINIBAND)  # noqa: B009
    assert getattr(whole.price(server), "currency") == "EUR"  # noqa: B009
    words = ("--nodes", 2, "--catalog", tmp_path / "filled.toml")
    assert predicted(server.name, *words)["time"]["step_seconds"]


def test_a_calibration_fills_in_what_it_measured(machine: Any, tmp_path: Path) -> None:
    machine(*[H100] * 8)
    path = calibration(tmp_path, H100)
    _, catalog = printed(tmp_path, "--calibration", path)
    gpu, server = catalog.gpu("H100-SXM"), catalog.server("8xH100-80GB-HBM3")
    assert (gpu.context_bytes, gpu.usable_memory_bytes) == (CONTEXT, USABLE - CONTEXT)
    assert gpu.matmul_efficiency == pytest.approx(500 / 989.4, abs=1e-4)
    assert gpu.memory_bandwidth_bytes_per_second == 3.35e12  # the datasheet's
    assert "25.0 GB/s" in str(getattr(server.host_link, "source"))  # noqa: B009
    words = ("--catalog", tmp_path / "mine.toml")
    alone, with_file = (predicted(server.name, *words, *more)["server"] for more in ((), ("--calibration", path)))
    assert alone == with_file  # the context is subtracted once
    assert (alone["context_bytes"], alone["gpu_memory_bytes"]) == (CONTEXT, USABLE - CONTEXT)
    assert refused("doctor", "--calibration", path)  # without --as-catalog


def test_copies_of_a_calibration_stand_in_for_an_unknown_bandwidth(machine: Any, tmp_path: Path) -> None:
    machine("NVIDIA X99")
    _, catalog = printed(tmp_path, "--calibration", calibration(tmp_path, "NVIDIA X99"))
    gpu = catalog.gpu("X99")
    assert gpu.memory_bandwidth_bytes_per_second == 2.9e12
    assert "the nominal rate is higher" in str(gpu.source.note)
    assert gpu.matmul_efficiency is None  # a fraction of an unknown peak


def test_gpus_without_nvlink_are_connected_by_pcie_and_one_gpu_by_nothing(machine: Any, tmp_path: Path) -> None:
    machine("NVIDIA L40S", "NVIDIA L40S", num_nvlinks=0)
    _, catalog = printed(tmp_path)
    assert getattr(catalog.server("2xL40S").intra_node, "generation") == "PCIe 5.0 x16"  # noqa: B009
    machine("NVIDIA L40S", num_nvlinks=0)
    text, catalog = printed(tmp_path)
    assert catalog.server("L40S").intra_node is None
    assert "intra_node" not in text


@pytest.mark.parametrize(
    ("names", "calibrated", "says"),
    [
        ((), None, "NVML shows no GPU here"),
        (("NVIDIA L4", H100), None, "an entry has one kind of GPU"),
        ((H100,), "NVIDIA L4", "made on 'NVIDIA L4', this machine has NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_machine_that_is_no_entry_or_was_not_calibrated_is_one_line(
    names: tuple[str, ...], calibrated: str | None, says: str, machine: Any, tmp_path: Path
) -> None:
    machine(*names)
    with pytest.raises(SpecError, match=says):
        printed(tmp_path, *(("--calibration", calibration(tmp_path, calibrated)) if calibrated else ()))
