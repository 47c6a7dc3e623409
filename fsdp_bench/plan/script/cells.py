"""Cells of a plan for a script: values on nodes of one kind. ScriptAnswers rehearses them, once for equal GPUs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fsdp_bench.plan.purchase.offer import Offer, OfferDocument, OfferMemory
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.ranges import Range, peak_range_of_script
from fsdp_bench.plan.rehearsal import Rehearsal, WhyUnknown
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.variants import Combinations, Variant
from fsdp_bench.spec.hardware import Hardware

AT_ONCE = 8
"""So many rehearsals are held in memory with all that their steps issue."""


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
class Found:
    """The answer of one cell: a script that fits and has a speed, one that does not fit, or neither is known."""

    fits: bool | None = None
    speed: Speed | None = None
    memory: OfferMemory | None = None
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

    source = "rehearsed"
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

    @property
    def what(self) -> dict[str, Any]:
        """The columns of a table that say what trains: the values."""
        return dict(self.values)

    def document(self) -> OfferDocument:
        """Return the offer, which was rehearsed, as a document."""
        assert self.found is not None
        assert self.found.memory is not None
        own = {"command": self.found.command, "tokens_per_step": self.speed.tokens_per_step}
        return self._document(self.found.memory, values=self.what, **own)


class ScriptAnswers:
    """The answers of a script on servers, as far as rehearsals tell."""

    def __init__(
        self,
        asked: Combinations,
        choices: Sequence[Mapping[str, str]],
        kinds: Sequence[ServerType],
        rehearsals: Rehearsals,
        progress: Callable[[Answered], None] = lambda one: None,
    ) -> None:
        """``choices``: the values of each, but for the server and the number of nodes."""
        self._asked, self._choices = asked, choices
        self._kinds = {kind.server.name: kind for kind in kinds}
        self._rehearsals, self._progress = rehearsals, progress
        self.found: dict[Cell, Found] = {}

    def why_refused(self, kind: ServerType, count: int) -> str | None:
        """Return why nothing can be rehearsed on a kind of server; None if it can."""
        return self._variant(Cell(kind.server.name, count, 0)).refused

    def ask(self, cells: Sequence[Cell], own: bool) -> None:
        """Rehearse cells: each by itself (``own``), else one for all with as many of the same GPUs if that suffices."""
        while missing := [one for one in cells if (known := self.found.get(one)) is None or (own and not known.is_own)]:
            first = {self._alike(one): one for one in reversed(missing)}
            some = list(first.values())[::-1][:AT_ONCE]
            for cell, answered in zip(
                some, self._rehearsals.answer(list(map(self._variant, some)), self._progress), strict=True
            ):
                self._take(cell, answered)

    def _alike(self, cell: Cell) -> tuple[str, int, int, int]:
        kind = self._kinds[cell.server]
        return kind.gpu.name, kind.gpus_per_node, cell.num_nodes, cell.choice

    def _variant(self, cell: Cell) -> Variant:
        own = {"server": cell.server, "nodes": str(cell.num_nodes)}
        return self._asked.variant({**self._choices[cell.choice], **own})

    def _take(self, cell: Cell, answered: Answered) -> None:
        """Keep an answer, and what it tells of the other servers with as many of the same GPUs."""
        asked = answered.variant.asked
        self.found[cell] = _found(answered)
        for server in self._kinds:
            other = cell._replace(server=server)
            if asked is None or self._alike(other) != self._alike(cell) or other == cell:
                continue
            variant = self._variant(other)
            known = self.found.get(other)
            if variant.asked is None or (known is not None and known.is_own):
                continue
            there = Answered(
                variant, tuple(variant.asked.answer(one.report) for one in answered.found), answered.reason
            )
            inputs = [(one.command, one.stand_in, one.options, one.ranks) for one in (asked, variant.asked)]
            found = _found(there, is_own=inputs[0] == inputs[1])
            if found.is_own or (known is None and _tells(answered, there, found)):
                self.found[other] = found


def _tells(answered: Answered, there: Answered, found: Found) -> bool:
    """Whether a rehearsal on the same GPUs with other memory kept free tells what fits there."""
    if answered.variant.asked is None or there.variant.asked is None or found.memory is None:
        return False
    if found.fits is False:
        return there.variant.asked.kept_free.num_bytes >= answered.variant.asked.kept_free.num_bytes
    return found.fits is True and (found.memory.headroom_bytes or 0) >= 0


def _found(answered: Answered, is_own: bool = True) -> Found:
    worst, command = answered.worst, answered.variant.command
    if worst is None:
        return Found(reason=answered.reason, command=command, is_own=is_own)
    report, speed = worst.report, _speed(worst) if worst.fits else None
    allocated, reserved = report.peak.allocated_bytes if report.peak is not None else 0, report.peak_reserved_bytes
    left = worst.available_bytes - reserved
    return Found(
        fits=worst.fits,
        speed=speed,
        memory=OfferMemory.of(allocated, reserved, left, worst.kept_free, peak_range_of_script()),
        command=command,
        torch=report.torch,
        reason=None if worst.fits is False or speed is not None else _reason(worst),
        is_own=is_own,
    )


def _speed(found: Rehearsal) -> Speed | None:
    time = found.time
    if time is None or time.time.step_seconds is None or time.tokens_per_second_per_gpu is None:
        return None
    each, step = time.tokens_per_second_per_gpu, time.time
    assert step.step_seconds is not None
    alone = (step.compute_seconds or 0.0) - step.slowed_seconds
    return Speed(
        tokens_per_second_per_gpu=each,
        without_collectives=each * step.step_seconds / alone if alone > 0 else each,
        tokens_per_step=round(each * step.step_seconds * found.report.world_size),
        range=time.range,
    )


def _reason(found: Rehearsal) -> str | None:
    """Return why it is not known whether a script fits, or how fast it is."""
    report = found.report
    if found.why_unknown is WhyUnknown.FAILED and report.failure is not None:
        return f"it failed with {report.failure.type}{report.failure.told}"
    if found.why_unknown is not None:
        return found.why_unknown.value
    why = found.why_no_speed
    return why if found.time is not None else f"its time is unknown: {why}"
