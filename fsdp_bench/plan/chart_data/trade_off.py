"""Memory against speed: one point for each setup, and the Pareto frontier: setups that no other setup beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.plan.question import Prediction
from fsdp_bench.spec.units import GIB


@dataclass(frozen=True)
class TradeOffPoint:
    """One setup: the GPU memory that it needs and how fast it is."""

    prediction: Prediction | None
    memory_gib: float
    """Peak reserved memory without allocation retries. For CPU kernels: peak live bytes."""
    tokens: float
    """Tokens per second of one GPU."""
    fits: bool | None


def trade_off_points(predictions: Sequence[Prediction]) -> list[TradeOffPoint]:
    """Return a point for each setup whose step time is known, the fastest first."""
    points = []
    for prediction in predictions:
        tokens = prediction.speed.tokens_per_second_per_gpu
        is_on_gpu = prediction.question.kernels == "cuda"
        memory = prediction.needed_bytes if is_on_gpu else prediction.estimate.memory.peak_allocated_bytes
        if tokens is not None:
            points.append(TradeOffPoint(prediction, memory / GIB, tokens, prediction.fits))
    return sorted(points, key=lambda point: (-point.tokens, point.memory_gib))


def pareto_frontier(points: Sequence[TradeOffPoint]) -> list[TradeOffPoint]:
    """Return the points that fit and that no other point beats, in order of increasing memory."""
    best: list[TradeOffPoint] = []
    usable = [point for point in points if point.fits is not False]
    for point in sorted(usable, key=lambda point: (point.memory_gib, -point.tokens)):
        if not best or point.tokens > best[-1].tokens:
            best.append(point)
    return best
