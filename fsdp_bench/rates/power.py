"""The rate of matrix products under a power limit.

A kernel's power is P = static + a f V(f)^2: f is the clock, V the voltage, and a how much its data and its code switch.
Up to a clock the voltage is constant, above it rises linearly (Schoonhoven, Veenboer, van Werkhoven, Batenburg, Going
green: optimizing GPUs for energy efficiency through model-steered auto-tuning, PMBS 2022; Kernel Tuner, energy.py;
a linear and a nonlinear part on A100, H100 and H200: arXiv 2607.00819). Where the limit binds, the clock falls until P
is the limit. ``Gpu.power.clock`` has the clock, the voltages and the static power, with what they were measured on.

What moves bytes keeps its rate, though a limit may lower its clock: a copy draws 536 W at 1980 MHz on an H100, and is
bound by memory. Attention and products in fp32 keep theirs, too: their power is not known.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from fsdp_bench.spec.hardware import ClockUnderPower, Gpu


def efficiency_under_power(gpu: Gpu, efficiency: float, is_fp8: bool = False) -> float:
    """Return the fraction of the peak that large matrix products reach at a GPU's power limit.

    Args:
        gpu: the GPU, with its limit.
        efficiency: the fraction at the limit for which ``gpu.power.clock`` is.
        is_fp8: whether they are in fp8, which are taken to run at the clock of those in 16 bits.
    """
    limit = gpu.limit_watts
    if gpu.power is None or gpu.power.clock is None or limit is None:
        return efficiency
    known = gpu.power.clock
    return efficiency * _clock_fraction(known, limit, known.matmul_efficiency if is_fp8 else efficiency)


@lru_cache(maxsize=256)
def _clock_fraction(known: ClockUnderPower, limit: float, efficiency: float) -> float:
    """Return the clock of a kernel under a limit, by its clock under the known one.

    A kernel that reaches less than ``known.matmul_efficiency`` at the known limit, such as an older cuBLAS's, needs as
    much energy per FLOP at the same voltage. It then has a higher voltage, and clock; at the highest clock, less power.
    """
    switching = known.clock_mhz * _voltage(known, known.clock_mhz) ** 2  # f V^2
    drawn, clock = 1.0, known.clock_mhz
    if efficiency < known.matmul_efficiency:
        square = _voltage(known, clock) ** 2
        clock = _clock_where(known, lambda at: _voltage(known, at) ** 2, square * known.matmul_efficiency / efficiency)
        drawn = efficiency * _voltage(known, clock) ** 2 / (known.matmul_efficiency * square)
        switching = clock * _voltage(known, clock) ** 2
    allowed = (limit - known.static_watts) / (known.limit_watts - known.static_watts) / drawn
    if allowed >= 1:
        return 1.0
    return _clock_where(known, lambda at: at * _voltage(known, at) ** 2, switching * max(allowed, 0.0)) / clock


def _voltage(known: ClockUnderPower, clock: float) -> float:
    """Return the voltage at a clock: constant below the first that is known, linear between two."""
    points = known.voltage
    if clock <= points[0][0]:
        return points[0][1]
    for (low, below), (high, above) in pairwise(points):
        if clock <= high:
            return below + (above - below) * (clock - low) / (high - low)
    return points[-1][1]


def _clock_where(known: ClockUnderPower, rising: Callable[[float], float], value: float) -> float:
    """Return the highest clock at which a function that rises with it is at most ``value``."""
    low, high = 0.0, known.voltage[-1][0]
    if rising(high) <= value:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) <= value else (low, middle)
    return low
