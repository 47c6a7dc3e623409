"""The largest value with which a script fits as a picture: memory over the value, or a bar for each combination."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.script.largest import LargestValue
from fsdp_bench.report.charts.axis import from_zero, memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Line, Piece, Plot, Point, Slide, check_number
from fsdp_bench.report.charts.each import MOST, conditions_of
from fsdp_bench.report.charts.memory_timeline import DIVIDER, USABLE
from fsdp_bench.report.text.largest import largest_line, title_of
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib

FITS, UNFIT = Style("blue"), Style("brick")


def largest_slide(found: Sequence[LargestValue]) -> Slide:
    """Return the picture of a search.

    Raises:
        SpecError: for more combinations than one picture shows legibly, or if none was rehearsed.
    """
    check_number("chart", len(found), MOST)
    answers = [one for each in found for one in each.tried.values() if one.worst is not None]
    if not answers:
        raise SpecError("chart: nothing was rehearsed that could be drawn")
    name = title_of(found[0].quantity)
    return Slide(
        f"{name[0].upper()}{name[1:]}: a training script (rehearsed)",
        largest_line(found),
        conditions_of(answers),
        (_memory(found[0]) if len(found) == 1 else _bars(found),),
        is_bad=not any(one.fits for one in found),
    )


def _memory(one: LargestValue) -> Plot:
    rehearsed = {value: each.worst for value, each in one.tried.items() if each.worst is not None}
    limit = max(worst.most_reserved_bytes for worst in rehearsed.values())
    unit, unit_name = memory_unit(limit)
    values, sizes = (
        list(map(float, rehearsed)),
        [worst.report.peak_reserved_bytes / unit for worst in rehearsed.values()],
    )
    x = from_zero(one.quantity.name.replace("_", " "), values)
    y = from_zero(f"peak reserved memory, {unit_name}", [*sizes, limit / unit])
    lines = [Line(USABLE, (x.low, x.high), (limit / unit,) * 2)]
    if one.largest is not None and one.next is not None:
        lines.append(Line(DIVIDER, ((one.largest + one.next) / 2,) * 2, (y.low, y.high)))
    return Plot(
        "",
        x,
        y,
        lines=tuple(lines),
        points=tuple(
            Point(FITS if worst.fits else UNFIT, value, size, title=f"{value:g}", is_hollow=worst.fits is None)
            for value, size, worst in zip(values, sizes, rehearsed.values(), strict=True)
        ),
        legend=(
            Key(FITS, "fits"),
            Key(UNFIT, "does not fit, or is unknown (hollow)"),
            Key(USABLE, f"{format_gib(limit)} that PyTorch can reserve"),
        ),
    )


def _bars(found: Sequence[LargestValue]) -> Bars:
    return Bars(
        "",
        (BarGroup("", tuple(map(_bar, found))),),
        axis=title_of(found[0].quantity),
        levels=tuple(found[0].values),
    )


def _bar(one: LargestValue) -> Bar:
    labels = tuple(one.values.values())
    if one.largest is None:
        return Bar(labels, ("nothing fits" if one.fits is False else "unknown",), is_result=False)
    return Bar(labels, (str(one.largest),), (Piece(one.quantity.name, one.largest, FITS),))
