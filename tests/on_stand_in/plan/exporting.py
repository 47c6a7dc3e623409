"""What a setting is predicted to need on the stand-in, and what its exported script needs there, by phase.

The predictions count what PyTorch's allocator does: bytes rounded up to 512.
"""

from __future__ import annotations

from pathlib import Path

from fsdp_bench.plan.estimate import read_allocator
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import write
from fsdp_bench.simulate.step import SimulatedSteps
from tests.on_stand_in.rehearsing import rehearse
from tests.plan.export.settings import export


def predicted(one: Chosen) -> dict[str, int]:
    """Return the peaks of allocated bytes by phase, on the stand-in."""
    asked = one.question
    usable = asked.gpu.usable_memory_bytes
    reading = read_allocator(SimulatedSteps(asked.model, one.setup, asked.kernel_set), usable, rank=0)
    return reading.phases


def rehearsed(one: Chosen, kind: str, folder: Path) -> dict[str, int]:
    """Return the same of the third step of an exported script, which is started as the export says."""
    files = export([kind], one)
    write(files, folder)
    command, *words = str(files[-1].start).split()
    words = words[3:] if command == "torchrun" else words  # the world is the rehearsal's
    given = ("--gpu", "H100-SXM", "--world-size", str(one.setup.world_size), "--steps", "3")
    found = rehearse(*given, "--", *words, command=command, folder=folder)
    return {span["phase"]: span["allocated_bytes"] for span in found.document["spans"] if span["step"] == 3}
