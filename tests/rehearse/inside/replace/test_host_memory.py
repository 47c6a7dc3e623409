"""Models in host memory take none of it, and real data stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rehearse.inside.rehearsing import run_inside

MIB = 1 << 20
IMPORTS = "import torch\nimport torch.distributed.fsdp\n"


Printed = Callable[[str], list[str]]


@pytest.fixture
def printed(tmp_path: Path) -> Printed:
    """Runs a script to its end; returns the words that it prints."""

    def run_script(script: str) -> list[str]:
        ran = run_inside(tmp_path, IMPORTS + script)
        assert ran.report["outcome"] == "ended", ran.output
        return ran.output.split()

    return run_script


def test_a_model_of_four_gigabytes_is_initialized_and_cast_without_them(tmp_path: Path) -> None:
    small = run_inside(tmp_path, IMPORTS).report["peak_host_bytes"]
    ran = run_inside(
        tmp_path,
        IMPORTS
        + """
from torch import nn
model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(16)])
for p in model.parameters():
    nn.init.trunc_normal_(p, std=0.02)
model = model.to(torch.bfloat16)
copy = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(copy)
""",
    )
    assert ran.report["outcome"] == "ended", ran.output
    assert ran.report["peak_host_bytes"] - small < 300 * MIB
    assert ran.report["peak_unwritten_host_bytes"] > 4 * 16 * 8192 * 8192


def test_real_data_keeps_its_values(printed: Printed) -> None:
    found = printed("""
data = torch.arange(4 * 2**20, dtype=torch.float32)
print(torch.equal(data.to(torch.float64).long(), torch.arange(4 * 2**20)))
other = torch.empty(4 * 2**20)
other.copy_(data)
print(torch.equal(other, data), torch.equal(data.clone(), data))
print(torch.ones(8 * 2**20, dtype=torch.int64).sum().item() == 8 * 2**20)
print(torch.zeros(100).fill_(3).sum().item() == 300)
data.add_(1)
print(data[5].item() == 6)
""")
    assert found == ["True", "True", "True", "True", "True", "True"]


def test_factories_obey_the_device_of_a_context(printed: Printed) -> None:
    found = printed("""
with torch.device("meta"):
    print(torch.ones(4).device, torch.zeros(4 * 2**20).device, torch.randn(4, device="cpu").device)
torch.set_default_device("meta")
print(torch.ones(4).device)
""")
    assert found == ["meta", "meta", "cpu", "meta"]


def test_what_was_never_written_reads_as_zeros_in_a_copy_too(printed: Printed) -> None:
    found = printed("""
model = torch.nn.Linear(4096, 4096)
copy = model.weight.detach().clone().float()
print(bool((copy == 0).all()), bool((model.weight == 0).all()))
gradient = torch.autograd.grad(model(torch.ones(1, 4096)).sum(), model.weight)[0]
print(gradient.shape == model.weight.shape)
""")
    assert found == ["True", "True", "True"]
