"""Noting what a step issues changes nothing in compiled code, whichever torch runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.rehearse.find_torch import Torch
from tests.on_stand_in.interpreters import every_torch
from tests.on_stand_in.rehearsing import SCRIPTS, Rehearsed, rehearse

pytestmark = [*every_torch, pytest.mark.timeout(240)]

FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
attention = torch.compile(flex_attention, dynamic=False)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024)
weight = torch.nn.Parameter(torch.randn(4, 8, 1024, 64, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight])
for _ in range(4):
    for _ in range(10):
        (attention(weight, weight, weight, block_mask=mask) * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _with_and_without_time(torch: Torch, command: str, script: Path, *options: str) -> tuple[Rehearsed, Rehearsed]:
    program = str(Path(torch.python).parent / command)
    noted, plain = (
        rehearse(*time, *options, "--steps", "4", "--", str(script), folder=script.parent, command=program)
        for time in (("--time",), ())
    )
    assert (plain.document["time"], plain.document["why_no_time"]) == (None, None)
    assert noted.document["memory"] == plain.document["memory"]
    assert noted.document["spans"] == plain.document["spans"]
    return noted, plain


def test_compiled_blocks_stay_compiled(torch: Torch) -> None:
    noted, _ = _with_and_without_time(torch, "torchrun", SCRIPTS / "compiled_blocks.py", "--server", "p5.48xlarge")
    time = noted.document["time"]
    assert time["unknown"] == {}
    kernels = sum(part["count"] for part in time["parts"] if part["name"].startswith("triton_"))
    assert kernels >= 4 * 6  # four blocks: norms, SwiGLU and additions, both ways


def test_flex_attention_stays_compiled(torch: Torch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FLEX)
    noted, _ = _with_and_without_time(torch, "python", tmp_path / "train.py", "--gpu", "H100-SXM")
    unknown = noted.document["time"]["unknown"]
    assert sum(unknown.values()) == 20
    assert all(name.startswith("triton_tem") for name in unknown)  # a template whose work nobody knows here
