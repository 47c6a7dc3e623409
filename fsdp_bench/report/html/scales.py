"""Axes: from values to percent of a chart's width or height, with ticks at round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from fsdp_bench.report.html.blocks import Tick

_WIDE = 20.0
"""From so many times the least value on an axis is logarithmic."""
_MOST_POWERS = 8
"""About so many powers of ten have ticks."""
_NEAR = 0.5
"""If the least value is above this fraction of the greatest, the axis does not begin at zero."""


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value, in percent, never outside of the axis."""
        low, high = (log10(self.low), log10(self.high)) if self.is_log else (self.low, self.high)
        place = log10(max(value, self.low)) if self.is_log else value
        return min(max((place - low) / (high - low) * 100, 0.0), 100.0)

    @property
    def begins_at_zero(self) -> bool:
        """Whether the axis begins at zero."""
        return self.low == 0

    def ticks(self) -> tuple[Tick, ...]:
        """Return ticks at round numbers."""
        values = _powers(self.low, self.high) if self.is_log else _steps(self.low, self.high)
        return tuple(Tick(self.at(value), _text(value)) for value in values)


def _text(value: float) -> str:
    """Return a number as short as a narrow screen needs: ``250k``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (size > 1e3 and value >= size):
            return f"{value / size:,.6g}{letter}"
    return f"{value:,.6g}"


def from_zero(values: Sequence[float]) -> Scale:
    """Return an axis from zero to a little above the greatest value."""
    return Scale(0.0, (max(values, default=0.0) or 1.0) * 1.06)


def around(values: Sequence[float], may_be_log: bool = False) -> Scale:
    """Return an axis that shows differences: from zero, or not far below values that are near to each other."""
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high > _WIDE * low:
        return Scale(low / 1.25, high * 1.25, is_log=True)
    if low <= _NEAR * high:
        return from_zero(values)
    edge = max(0.25 * (high - low), 0.02 * high) or 1.0
    return Scale(max(low - edge, 0.0), high + edge)


def _steps(low: float, high: float, most: int = 6) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = floor(log10(low)), ceil(log10(high))
    powers = range(first, last + 1, max((last - first) // _MOST_POWERS, 1))
    sizes = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [size * 10.0**power for power in powers for size in sizes if low <= size * 10.0**power <= high]


def remarks_of(y: Scale, what: str, are_merged: bool) -> tuple[str, ...]:
    """Return what a reader of a plot has to know: an axis that does not begin at zero, points that share a mark."""
    cut = () if y.begins_at_zero else (f"the axis of {what} does not begin at zero",)
    return (*cut, *(("points that would overlap share a mark, at their mean",) if are_merged else ()))
