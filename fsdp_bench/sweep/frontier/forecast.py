"""The prediction for one cell, where the search with real trials begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fsdp_bench.plan.search.fit import FitCheck
from fsdp_bench.plan.search.search import find_largest
from fsdp_bench.simulate.operators.kernels import CPU_EMULATED, CPU_GLOO
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.frontier import FirstFailure
from fsdp_bench.sweep.frontier.file import Search


@dataclass(frozen=True)
class Forecast:
    """The predicted ``fits`` and ``runs`` of a cell. Both are None if nothing can be predicted."""

    fits: int | None
    runs: int | None
    limited_by: FirstFailure | None
    why_not: str | None = None
    """Why there is no prediction, in one line."""


@cache
def forecast(search: Search) -> Forecast:
    """Predict a cell's limits, with the memory limit of its trials. The answer is cached."""
    if search.skip_reason is not None:
        return Forecast(None, None, None)
    try:
        found = find_largest(search.quantity, _check(search))
    except SpecError as error:
        return Forecast(None, None, None, f"no prediction: {error}")
    limit, above = found.limited_by, found.fits + 1
    if limit is None or above == len(search.quantity):
        return Forecast(found.fits, found.runs, None)
    place = "budget" if search.device == "cpu" else limit.place
    failure = FirstFailure(
        value=search.quantity.values[above], place=place, phase=limit.phase, ran_out=found.runs == found.fits
    )
    return Forecast(found.fits, found.runs, failure)


def _check(search: Search) -> FitCheck:
    if search.device == "cpu":
        kernels = CPU_EMULATED if search.run.emulate else CPU_GLOO
        return FitCheck(kernels=kernels, budget_bytes=search.run.memory_limit_bytes)
    return FitCheck(headroom_bytes=0)  # a trial may fill the GPU: what context and NCCL take is not torch's to have
