"""Goal: what is asked for, and what is left open."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.price import StatedPrice, Tariff
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.units import parse_count

SECONDS_PER_DAY = 86_400

_TIME = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(h|hour|hours|d|day|days|w|week|weeks)\s*$", re.IGNORECASE)
_SECONDS = {"h": 3600, "d": SECONDS_PER_DAY, "w": 7 * SECONDS_PER_DAY}
_TOKENS = re.compile(r"[-\s]*tokens?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Goal:
    """The goal of a plan."""

    model: Model
    other: Model | None = None
    """The same model in other code, whose time and price on the winner's servers are said beside."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainSetup that the user states, precision and sequence length among them."""
    open: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields of TrainSetup of which the user states several values."""
    tokens: int | None = None
    """Tokens to train on. None: only the speed is asked for."""
    deadline_seconds: float | None = None
    budget: float | None = None
    global_batch_tokens: int | None = None
    """Tokens of one optimizer step on all GPUs. None: one micro-batch on each."""
    tariff: Tariff = Tariff.ON_DEMAND
    stated_price: StatedPrice | None = None
    """A price for all servers, instead of the catalogue's."""
    headroom_bytes: int | None = None
    """Memory kept free on each GPU, instead of what headroom.py derives and assumes."""

    def __post_init__(self) -> None:
        if self.tokens is None and (self.deadline_seconds is not None or self.budget is not None):
            raise SpecError("deadline and budget need --tokens: how many tokens to train on")


def parse_duration(text: str) -> float:
    """Read ``30d``, ``12h`` or ``6 weeks``; return seconds.

    Raises:
        SpecError: for anything else.
    """
    match = _TIME.match(text)
    if match is None or float(match[1]) <= 0:
        raise SpecError(f"deadline: {shown(text)} is not allowed; write it like '30d', '12h' or '6 weeks'")
    return float(match[1]) * _SECONDS[match[2][0].lower()]


def parse_money(text: str) -> float:
    """Read ``200k``, ``1.5M`` or ``$90000``.

    Raises:
        SpecError: for anything else.
    """
    try:
        return float(parse_count(text.strip().lstrip("$").strip(), "budget"))
    except SpecError:
        raise SpecError(f"budget: {shown(text)} is not allowed; write it like '200k' or '90000'") from None


def parse_tokens(text: str, option: str) -> int:
    """Read ``1T``, ``300B`` or ``4M-tokens``.

    Raises:
        SpecError: for anything else.
    """
    try:
        return parse_count(_TOKENS.sub("", text), option)
    except SpecError:
        raise SpecError(f"{option}: {shown(text)} is not allowed; write it like '1T', '300B' or '4M'") from None
