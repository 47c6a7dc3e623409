"""The largest value with which a script fits, found in few rehearsals, is that of a full scan."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.on_stand_in.rehearsing import rehearse

SCRIPT = """
import argparse, os
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
parser = argparse.ArgumentParser()
for name in ("width", "layers", "bs", "seq"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--ckpt", action="store_true")
given = parser.parse_args()
layers = nn.ModuleList([
    nn.TransformerEncoderLayer(given.width, 8, 4 * given.width, dropout=0, batch_first=True, device="cuda")
    for _ in range(given.layers)
])
if "RANK" in os.environ:
    torch.distributed.init_process_group("nccl")
    for layer in layers:
        fully_shard(layer)
optimizer = torch.optim.AdamW(layers.parameters())
for _ in range(3):
    x = torch.randn(given.bs, given.seq, given.width, device="cuda")
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if given.ckpt else layer(x)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("seed", "count", "most"), [(1, 6, 5), *(pytest.param(seed, 20, 10, marks=pytest.mark.slow) for seed in (11, 15))]
)
def test_the_border_is_that_of_a_full_scan(seed: int, count: int, most: int, tmp_path: Path) -> None:
    assert compare_with_scan(seed, count, tmp_path) <= most


def compare_with_scan(seed: int, count: int, folder: Path) -> int:
    """Draw a script and a GPU's memory; return how many of so many values the search rehearsed."""
    random = Random(seed)
    (folder / "train.py").write_text(SCRIPT)
    width, layers, name = random.choice([256, 512, 1024]), random.randint(1, 4), random.choice(["bs", "seq"])
    step = random.choice([1, 2, 3]) if name == "bs" else 128
    values = range(step, count * step + 1, step)
    sizes = {"bs": str(random.choice([2, 4])), "seq": str(random.choice([256, 512])), name: f"{{{name}}}"}
    is_checkpointed, command = random.random() < 0.4, random.choice(["python", "torchrun"])
    words = [f"--width={width}", f"--layers={layers}", *(f"--{key}={value}" for key, value in sizes.items())]
    words += ["--ckpt"] * is_checkpointed
    # about what a value takes: 12 matrices of parameters, of which 20 bytes each; 64 bytes of activations by token
    tokens = random.choice(values) * int(sizes["seq" if name == "bs" else "bs"])
    states = 20 * 12 * width**2 * layers // (8 if command == "torchrun" else 1)
    memory = states + 64 * width * tokens * (2 if is_checkpointed else layers) + random.randrange(1 << 26) + (1 << 26)
    world = ("--world-size", "8") if command == "torchrun" else ()
    options = ("--gpu", "H100-SXM", *world, "--headroom", "1B", "--gpu-memory", f"{memory}B", "--steps", "2")
    given: dict[str, Any] = {"command": command, "folder": folder}
    scan = rehearse(*options, "--each", f"{name}={','.join(map(str, values))}", "--", "train.py", *words, **given)
    fits = {int(one["values"][name]): one["fits"] for one in scan.document["rehearsals"]}
    found = rehearse(
        *options,
        "--of",
        f"{name}={step}..{count * step}:{step}",
        "--",
        "train.py",
        *words,
        question="max-size",
        **given,
    )
    (one,) = found.document["searches"]
    tried = {each["value"]: each["fits"] for each in one["rehearsals"]}
    assert one["is_found"]
    assert tried.items() <= fits.items()
    assert one["largest"] == max(value for value in values if fits[value])
    assert one["next"] == (None if one["largest"] == values[-1] else one["largest"] + step)
    return len(tried)
