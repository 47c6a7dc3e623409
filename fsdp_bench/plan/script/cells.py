"""Cells of a plan for a script: each is one choice of values on so many nodes of one kind, and what is known of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fsdp_bench.plan.headroom import Headroom
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.ranges import Range
from fsdp_bench.spec.hardware import Hardware


class Cell(NamedTuple):
    """One combination of a plan."""

    server: str
    num_nodes: int
    choice: int
    """The place among the choices of values."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The time of a rehearsed step."""

    tokens_per_second_per_gpu: float
    without_collectives: float
    """The same if a GPU did nothing but compute: what it does not exceed on fewer nodes."""
    tokens_per_step: int
    """Tokens of an optimizer step on all GPUs."""
    range: Range | None = None

    @property
    def waits(self) -> float:
        """Seconds a token in which a GPU computes nothing, because of collectives for the most part."""
        return max(1 / self.tokens_per_second_per_gpu - 1 / self.without_collectives, 0.0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of a rehearsed script, in bytes."""

    allocated: int
    reserved: int
    available: int
    """GPU memory that torch's allocator can reserve."""
    kept_free: Headroom


@dataclass(frozen=True, kw_only=True)
class Found:
    """The answer of one cell: a script that fits and has a speed, one that does not fit, or neither is known."""

    fits: bool | None = None
    speed: Speed | None = None
    memory: Memory | None = None
    command: tuple[str, ...] = ()
    torch: str | None = None
    reason: str | None = None
    """Why it is unknown whether it fits, or how fast it is."""
    is_own: bool = True
    """Whether it was rehearsed by itself. If not, the same GPUs in other servers were, and the links differ."""

    @property
    def trains(self) -> bool:
        """Whether it is known to fit, and how fast it is."""
        return bool(self.fits) and self.speed is not None


@dataclass(frozen=True, kw_only=True)
class ScriptOffer(Offer):
    """A script with one choice of values on so many servers."""

    cell: Cell
    values: Mapping[str, str]
    kind: ServerType
    speed: Speed
    found: Found | None = None
    """None if its speed is estimated. Such an offer is never shown."""

    @cached_property
    def cluster(self) -> Hardware:
        """The servers."""
        kind, count = self.kind, self.cell.num_nodes
        return Hardware(server=kind.server, gpu=kind.gpu, num_nodes=count, gpus_per_node=kind.gpus_per_node)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The speed of one GPU."""
        return self.speed.tokens_per_second_per_gpu

    @property
    def range(self) -> Range | None:
        """The range of its speed, by measured scripts and published runs."""
        return self.speed.range

    @property
    def identity(self) -> Hashable:
        """The combination."""
        return self.cell

    @property
    def text(self) -> str:
        """The offer in one line."""
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return self.line(values or "as it stands", "rehearsed, time predicted")

    def row(self) -> dict[str, Any]:
        """Return the offer as one row of a table."""
        memory = self.found.memory if self.found is not None else None
        return {
            "source": "rehearsed",
            **self.values,
            "peak_reserved_bytes": memory and memory.reserved,
            "headroom_bytes": memory and memory.available - memory.reserved,
            **self.row_of_all(),
        }
