"""Several rehearsals of one command as a picture: memory of each combination, and memory against speed."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.script.each import in_order, speed_of
from fsdp_bench.plan.script.rehearsals import Answered
from fsdp_bench.report.charts.axis import memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece, Plot, Slide, check_number
from fsdp_bench.report.charts.trade_off import TradeOffPoint, trade_off_plot
from fsdp_bench.report.text.each import conclusion
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib

MOST = 24
"""Most combinations in one picture that remain legible."""
ALLOCATED, RESERVED, UNFIT = Style("blue"), Style("light-grey"), Style("brick")


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
    gpus = {one.worst.gpu.name: one.worst.available_bytes for one in found if one.worst is not None}
    kept = "; ".join(f"{format_gib(size)} that PyTorch can reserve on {name}" for name, size in gpus.items())
    script = first.report.sentence.partition(": replaced by")[0]
    return Slide(
        f"Memory of a training script (rehearsed): {' or '.join(gpus)}, rank {first.report.rank}",
        conclusion(ordered),
        (script, f"torch {first.report.torch} on a stand-in for NVIDIA's libraries", kept),
        (_memory(ordered), *([plot] if (plot := _against_speed(found, gpus)) is not None else [])),
        is_bad=not ordered[0].fits,
    )


def _memory(answers: Sequence[Answered]) -> Bars:
    peaks = [one.worst.report.peak_reserved_bytes if one.worst else 0 for one in answers]
    unit, unit_name = memory_unit(max(peaks) or 1)
    return Bars(
        "",
        (BarGroup("", tuple(map(_bar, answers))),),
        axis=f"peak memory of one GPU, {unit_name}",
        scale=unit,
        levels=tuple(answers[0].variant.values),
        legend=(Key(ALLOCATED, "allocated"), Key(RESERVED, "reserved beyond that"), Key(UNFIT, "does not fit")),
    )


def _bar(one: Answered) -> Bar:
    labels, worst = tuple(one.variant.values.values()), one.worst
    if worst is None or worst.report.peak is None:
        return Bar(labels, ("unknown",), is_result=False)
    allocated, reserved = worst.report.peak.allocated_bytes, worst.report.peak_reserved_bytes
    if worst.fits is False:
        return Bar(labels, ("does not fit",), (Piece("does not fit", reserved, UNFIT),), color="failure")
    pieces = (Piece("allocated", allocated, ALLOCATED), Piece("reserved", reserved - allocated, RESERVED))
    return Bar(labels, (f"{reserved / memory_unit(reserved)[0]:.1f}",), pieces)


def _against_speed(found: Sequence[Answered], gpus: dict[str, int]) -> Plot | None:
    points = [
        TradeOffPoint(one.worst.report.peak_reserved_bytes, speed, one.fits, number, one.variant.title)
        for number, one in enumerate(found, start=1)
        if one.worst is not None and (speed := speed_of(one)) is not None
    ]
    if len(points) < 2:
        return None
    usable = {size: name for name, size in gpus.items()}
    return trade_off_plot(points, "", "reserved memory of one GPU (rehearsed)", "predicted tokens/s per GPU", usable)
