"""How far predictions of speed have been from published runs, by GPU generation: a range beside a predicted speed.

catalog/speed_errors.json has the errors of ``validate --against published``; ``python -m tests.docs.update`` writes it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

from fsdp_bench.spec.hardware import Gpu


class SpeedErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The errors of published runs on one GPU generation, eager or compiled."""

    num_runs: int
    families: tuple[str, ...]
    """Publishers."""
    lowest: float
    """``predicted / published - 1``."""
    highest: float


class Range(NamedTuple):
    """The speeds that earlier errors leave possible, as multiples of the predicted one."""

    slowest: float
    fastest: float
    because: str
    """The errors, in words."""


@cache
def speed_errors() -> dict[str, SpeedErrors]:
    """Return the errors by ``A100 eager``, ``H100 compiled``, ..."""
    data = files("fsdp_bench.catalog").joinpath("speed_errors.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, SpeedErrors])


def range_of(gpu: Gpu, compiled: bool) -> Range | None:
    """Return the range of a speed on a GPU; None if no published run on its generation was ever compared.

    It contains the prediction itself.
    """
    name = f"{gpu.name.split('-')[0]} {'compiled' if compiled else 'eager'}"
    found = speed_errors().get(name)
    if found is None or "PCIE" in gpu.name.upper():
        return None
    slowest, fastest = 1 / (1 + max(found.highest, 0.0)), 1 / (1 + min(found.lowest, 0.0))
    return Range(slowest, fastest, f"{_in_words(found)} in {found.num_runs} published {name} runs")


def _in_words(errors: SpeedErrors) -> str:
    low, high = errors.lowest, errors.highest
    if low >= 0:
        return f"predictions were {low:.0%} to {high:.0%} too fast"
    if high <= 0:
        return f"predictions were {-high:.0%} to {-low:.0%} too slow"
    return f"predictions were up to {high:.0%} too fast and up to {-low:.0%} too slow"
