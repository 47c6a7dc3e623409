"""Several rehearsals of one command as a picture: the memory of each combination, and its speed below."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal import Rehearsal
from fsdp_bench.plan.script.each import in_order, speed_of
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.charts.axis import memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece, Slide, check_number
from fsdp_bench.report.text.each import conclusion
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib

MOST = 24
"""Most combinations in one picture that remain legible."""
ALLOCATED, RESERVED, UNFIT, SPEED = Style("blue"), Style("light-grey"), Style("brick"), Style("green")


def each_slide(answers: Sequence[Answered]) -> Slide:
    """Return the picture of several combinations.

    Raises:
        SpecError: for more combinations than one picture shows legibly, or if none was rehearsed.
    """
    check_number("chart", len(answers), MOST)
    ordered = in_order(answers)
    found = [one for one in ordered if one.worst is not None]
    if not found:
        raise SpecError("chart: nothing was rehearsed that could be drawn")
    first = found[0].worst
    assert first is not None
    gpus = dict.fromkeys(one.worst.gpu.name for one in found if one.worst is not None)
    return Slide(
        f"Memory of a training script (rehearsed): {' or '.join(gpus)}, rank {first.report.rank}",
        conclusion(ordered),
        conditions_of(found),
        (_memory(ordered), *([_speed(ordered)] if any(speed_of(one) for one in ordered) else [])),
        is_bad=not ordered[0].fits,
    )


def conditions_of(found: Sequence[Answered]) -> tuple[str, ...]:
    """Return the conditions of rehearsals, of which there is at least one: the script, torch, and the GPUs' memory."""
    worst = [one.worst for one in found if one.worst is not None]
    gpus = {one.gpu.name: one.available_bytes for one in worst}
    kept = "; ".join(f"{format_gib(size)} that PyTorch can reserve on {name}" for name, size in gpus.items())
    return (found[0].variant.template, f"torch {worst[0].report.torch} on a stand-in for NVIDIA's libraries", kept)


def _memory(answers: Sequence[Answered]) -> Bars:
    peaks = [one.worst.report.peak_reserved_bytes if one.worst else 0 for one in answers]
    unit, unit_name = memory_unit(max(peaks) or 1)
    return Bars(
        "peak memory",
        (BarGroup("", tuple(_bar(one, unit) for one in answers)),),
        axis=unit_name,
        scale=unit,
        levels=tuple(answers[0].variant.values),
        legend=tuple(_MEMORY_KEYS[style] for style in _MEMORY_KEYS if style is not UNFIT or _any_is_unfit(answers)),
    )


_MEMORY_KEYS = {
    ALLOCATED: Key(ALLOCATED, "allocated"),
    RESERVED: Key(RESERVED, "reserved beyond that"),
    UNFIT: Key(UNFIT, "does not fit"),
}


def _any_is_unfit(answers: Sequence[Answered]) -> bool:
    return any(one.fits is False for one in answers)


def _bar(one: Answered, unit: float) -> Bar:
    labels, worst = tuple(one.variant.values.values()), one.worst
    if worst is None or worst.report.peak is None:
        return Bar(labels, ("unknown",), is_result=False)
    allocated, reserved = worst.report.peak.allocated_bytes, worst.report.peak_reserved_bytes
    if worst.fits is False:
        return Bar(labels, (_unfit_word(worst),), (Piece("does not fit", reserved, UNFIT),), color="failure")
    pieces = (Piece("allocated", allocated, ALLOCATED), Piece("reserved", reserved - allocated, RESERVED))
    return Bar(labels, (f"{reserved / unit:.1f}",), pieces)


def _unfit_word(found: Rehearsal | None) -> str:
    if found is None or found.fits is not False:
        return "unknown"
    return "with retries" if found.verdict is Verdict.RUNS_WITH_RETRIES else "does not fit"


def _speed(answers: Sequence[Answered]) -> Bars:
    bars = []
    for one in answers:
        labels, speed = tuple(one.variant.values.values()), speed_of(one)
        if speed is None or one.fits is False:
            bars.append(Bar(labels, (_unfit_word(one.worst),), is_result=False))
        else:
            bars.append(Bar(labels, (f"{speed:,.0f}",), (Piece("speed", speed, SPEED),)))
    legend = (Key(SPEED, "speed, predicted from what was issued"),)
    levels = tuple(answers[0].variant.values)
    return Bars("predicted", (BarGroup("", tuple(bars)),), axis="tokens/s per GPU", levels=levels, legend=legend)
