"""Bars of memory: what is alive at the peak, and the peak of each phase."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, BarGroup, Bars, Key, Piece
from fsdp_bench.report.charts.memory_timeline import STYLES
from fsdp_bench.report.text.setups import spaced
from fsdp_bench.spec.units import format_gib

PREDICTED, MEASURED = Style("sky"), Style("ink", sign="D")
_ORDER = ("load", "forward", "loss", "backward", "optimizer")


def breakdown_bars(breakdown: Mapping[str, int], heading: str) -> Bars:
    """Return what is alive at the peak, the largest part first."""
    total = sum(breakdown.values()) or 1
    parts = sorted(((name, size) for name, size in breakdown.items() if size), key=lambda part: -part[1])
    bars = [
        Bar(
            (spaced(name),),
            (f"{format_gib(size)}, {size / total:.1%}",),
            (Piece(spaced(name), size, STYLES.get(name, STYLES["temporary"])),),
        )
        for name, size in parts
    ]
    return Bars(heading, (BarGroup("", tuple(bars)),))


def phase_bars(phases: Mapping[str, int], heading: str, measured: Mapping[str, int] | None = None) -> Bars:
    """Return the peak of each phase, with a mark where it was measured."""
    bars = []
    for name in sorted(phases, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)):
        own = (measured or {}).get(name)
        words = (format_gib(phases[name]), *([] if own is None else [f"measured {format_gib(own)}"]))
        bars.append(Bar((name,), words, (Piece(name, phases[name], PREDICTED),), mark=own))
    legend = () if measured is None else (Key(PREDICTED, "predicted"), Key(MEASURED, "measured"))
    return Bars(heading, (BarGroup("", tuple(bars)),), legend=legend)
