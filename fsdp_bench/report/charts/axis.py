"""Axes: where a value stands, and ticks at round numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from fsdp_bench.spec.units import GIB, MIB


@dataclass(frozen=True)
class Tick:
    """A word at a place of an axis, in the axis's unit."""

    value: float
    text: str


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, with its unit in the title."""

    title: str
    low: float
    high: float
    is_log: bool = False
    names: tuple[Tick, ...] | None = None
    """Words along the axis. None: round numbers."""
    has_grid: bool = True

    def at(self, value: float) -> float:
        """Return the place of a value, in percent, never outside of the axis."""
        low, high = (log10(self.low), log10(self.high)) if self.is_log else (self.low, self.high)
        place = log10(max(value, self.low)) if self.is_log else value
        return min(max((place - low) / (high - low) * 100, 0.0), 100.0)

    def ticks(self) -> tuple[Tick, ...]:
        """Return the words along the axis."""
        if self.names is not None:
            return self.names
        values = _powers(self.low, self.high) if self.is_log else _steps(self.low, self.high)
        return tuple(Tick(value, _text(value)) for value in values)

    @property
    def remark(self) -> str:
        """A warning that the axis does not begin at zero; empty if it does."""
        return "" if self.low == 0 else "the axis does not begin at zero"


_WIDE = 20.0
"""An axis is logarithmic if the greatest value is more than this many times the least."""
_MOST_POWERS = 8
"""About so many powers of ten have ticks."""
_NEAR = 0.5
"""If the least value is above this fraction of the greatest, the axis does not begin at zero."""


def from_zero(title: str, values: Iterable[float]) -> Axis:
    """Return an axis from zero to a little above the greatest value."""
    return Axis(title, 0.0, (max(values, default=0.0) or 1.0) * 1.06)


def around(title: str, values: Sequence[float], may_be_log: bool = False) -> Axis:
    """Return an axis that shows differences: from zero, or not far below values that are near to each other."""
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high > _WIDE * low:
        return Axis(f"{title} (logarithmic)", low / 1.25, high * 1.25, is_log=True)
    if low <= _NEAR * high:
        return from_zero(title, values)
    edge = max(0.25 * (high - low), 0.04 * high) or 1.0
    return Axis(title, max(low - edge, 0.0), high + edge)


def _text(value: float) -> str:
    """Return a number as short as a narrow screen needs: ``250k``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (size > 1e3 and value >= size):
            return f"{value / size:,.6g}{letter}"
    return f"{value:,.6g}"


def _steps(low: float, high: float, most: int = 8) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    first, last = floor(log10(low)), ceil(log10(high))
    powers = range(first, last + 1, max((last - first) // _MOST_POWERS, 1))
    sizes = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [size * 10.0**power for power in powers for size in sizes if low <= size * 10.0**power <= high]


def memory_unit(highest: float) -> tuple[float, str]:
    """Return the unit of an axis of memory, in bytes and by name."""
    return (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
