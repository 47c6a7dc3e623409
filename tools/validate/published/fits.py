"""Compares predicted with published outcomes: fits, runs with retries, or out of memory.

The caching allocator is replayed on the GPU that the source names. A run with allocation retries (cudaMalloc fails,
cached blocks are freed, then it succeeds) continues more slowly: "runs with retries" is a third answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fsdp_bench.plan.estimate import Verdict, estimate
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.simulate.operators.kernels import kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from tools.validate.published.cases import CaseInputs, PublishedCase, read_cases
from tools.validate.published.hardware import cluster_of
from tools.validate.published.setups import Plan, Unpredictable, plan_case


class FitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published outcome and its prediction, or the reason why there is none."""

    case: str
    source: str
    compiled: bool
    """Whether the published code was compiled. Predictions are for eager mode where compiled code is not recorded."""
    ran: bool
    """Whether the published run completed. False: it ran out of memory."""
    predicted: Verdict | None = None
    reserved_bytes: int | None = None
    """Predicted peak reserved memory. Retries keep it within the GPU's memory."""
    card_bytes: int | None = None
    num_alloc_retries: int | None = None
    """Predicted allocation retries in the first steps."""
    num_retries_later: int | None = None
    """The most in one later step. None where memory ran out, or that is not known."""
    reason: str | None = None


def compare_fits(cases: Iterable[PublishedCase] | None = None) -> list[FitRow]:
    """Predict the outcome of every published run with a stated outcome; by default of the packaged cases."""
    return [_compare(case) for case in (read_cases() if cases is None else cases) if case.outcome is not None]


def _compare(case: PublishedCase) -> FitRow:
    inputs = case.inputs
    row = FitRow(case=inputs.case, source=inputs.source, compiled=inputs.compiled == "yes", ran=case.outcome == "fits")
    plan = plan_case(inputs)
    if isinstance(plan, Unpredictable):
        return msgspec.structs.replace(row, reason=plan.reason)
    if plan.gpu is None or plan.gpu.usable_memory_bytes is None:
        return msgspec.structs.replace(row, reason=f"{inputs.gpu}: the source does not state the GPU's memory")
    try:
        reading = _reading(inputs, plan)
    except SpecError as error:
        return msgspec.structs.replace(row, reason=str(error))
    return msgspec.structs.replace(
        row,
        predicted=fit_of(reading),
        reserved_bytes=reading.peak_reserved_bytes,
        card_bytes=plan.gpu.usable_memory_bytes,
        num_alloc_retries=reading.num_alloc_retries,
        num_retries_later=reading.num_retries_later,
    )


def _reading(inputs: CaseInputs, plan: Plan) -> AllocatorReading:
    """Replay the allocator with the least memory of NCCL kept free; return its statistics."""
    cluster = cluster_of(inputs)
    taken = communicators_of(plan.setup, cluster).num_bytes
    steps = SimulatedSteps(plan.model, plan.setup, kernels_on(plan.kernels, cluster.gpu))
    return estimate(steps, cluster, headroom_bytes=taken.low if taken else 0).allocator


def fit_of(reading: AllocatorReading) -> Verdict:
    """Return the verdict of a replay on a GPU."""
    if reading.out_of_memory is not None:
        return Verdict.DOES_NOT_FIT
    return Verdict.RUNS_WITH_RETRIES if reading.num_alloc_retries else Verdict.FITS
