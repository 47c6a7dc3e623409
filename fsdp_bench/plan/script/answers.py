"""ScriptAnswers: rehearses cells of a plan, and tells servers with the same GPUs from one rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.rehearsal import Rehearsal, WhyUnknown
from fsdp_bench.plan.script.cells import Cell, Found, Memory, Speed
from fsdp_bench.plan.script.rehearsals import Answered, Rehearsals
from fsdp_bench.plan.script.variants import Combinations, Variant

AT_ONCE = 8
"""So many rehearsals are held in memory with all that their steps issue."""

_WHY_UNKNOWN = {
    WhyUnknown.UNSUPPORTED: "it called a CUDA function that the stand-in does not have",
    WhyUnknown.CUT: "it was ended before it had trained (--timeout)",
    WhyUnknown.NO_GPU: "it never used the GPU",
    WhyUnknown.NO_STEP: "it made no optimizer step",
    WhyUnknown.VALUES: "it reads values from the GPU that may decide sizes",
    WhyUnknown.ONE_STEP: "it made only one optimizer step",
}


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
        """Rehearse cells.

        ``own``: each by itself. Else one is enough of those on as many of the same GPUs, where that tells the others.
        """
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
    kept, kept_there = answered.variant.asked.kept_free.num_bytes, there.variant.asked.kept_free.num_bytes
    if found.fits is False:
        return kept_there >= kept
    return found.fits is True and found.memory.reserved <= found.memory.available


def _found(answered: Answered, is_own: bool = True) -> Found:
    """Return what a rehearsal says of a cell."""
    worst, command = answered.worst, answered.variant.command
    if worst is None:
        return Found(reason=answered.reason, command=command, is_own=is_own)
    memory = Memory(
        allocated=worst.report.peak.allocated_bytes if worst.report.peak is not None else 0,
        reserved=worst.report.peak_reserved_bytes,
        available=worst.available_bytes,
        kept_free=worst.kept_free,
    )
    speed = _speed(worst) if worst.fits else None
    return Found(
        fits=worst.fits,
        speed=speed,
        memory=memory,
        command=command,
        torch=worst.report.torch,
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
        return _WHY_UNKNOWN.get(found.why_unknown, "it failed")
    why = found.why_no_speed
    return why if found.time is not None else f"its time is unknown: {why}"
