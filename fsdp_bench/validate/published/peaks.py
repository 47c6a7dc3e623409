"""Compares other people's peaks of memory with predicted ones; each kind of peak with its own kind.

A prediction is made from ``CaseInputs``, which has no measured column; where the framework's code is known to save
other tensors than our models, that is a named term (terms.py), listed with the prediction and never a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from fsdp_bench.plan.estimate import estimate, replay
from fsdp_bench.replay.caching_allocator.program import program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.replay.live_memory import live_memory
from fsdp_bench.simulate.operators.kernels import kernels_on
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.step import first_steps
from fsdp_bench.validate.published.cases import PublishedCase, describe, read_cases
from fsdp_bench.validate.published.setups import Plan, Unpredictable, plan_case
from fsdp_bench.validate.published.terms import ADAMW_NOT_STATED, Term, terms_of

PREDICTED_KINDS = {
    "max_active": "peak_active_bytes",
    "max_allocated": "peak_allocated_bytes",
    "max_reserved": "peak_reserved_bytes",
}
"""The published kinds of peak, and the field of AllocatorReading that each is compared with, alone."""

LOSS_BACKWARD = "aten::_log_softmax_backward_data"
"""Where the sizes of named terms can be added up: everything that forward saved is alive then."""


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peak of one case, published and predicted; or why it is not predicted."""

    case: str
    family: str
    source: str
    setup: str
    compiled: bool = False
    """Whether the published code was compiled; predictions are for eager."""
    kind: str | None = None
    """None where the source prints no memory."""
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    error: float | None = None
    """Predicted over measured, less one."""
    peak_at: str | None = None
    """Phase and operator of the predicted peak of live bytes."""
    terms: tuple[Term, ...] = ()
    """How the framework's code differs from what was predicted."""
    with_terms_bytes: int | None = None
    """The prediction and the sizes of its terms; None where they cannot be added up."""
    error_with_terms: float | None = None
    assumptions: tuple[str, ...] = ()
    reason: str | None = None
    """Why there is no prediction."""


@dataclass(frozen=True)
class PredictedPeaks:
    """The peaks of one plan."""

    reading: AllocatorReading
    peak_phase: str
    peak_operator: str


# -- predicting ------------------------------------------------------------------------------------------------------


def predict_case(plan: Plan) -> PredictedPeaks:
    """Return the peaks of a plan, for eager."""
    if plan.has_reducer:
        # The runs had what the GPU had.
        whole = estimate(plan.model, plan.setup, plan.gpu, plan.kernels, headroom_bytes=0)
        return PredictedPeaks(whole.allocator, whole.memory.peak_phase, whole.memory.peak_operator)
    kernels = kernels_on(plan.kernels, plan.gpu)
    log = without_reducer(first_steps(plan.model, plan.setup, kernels))
    live = live_memory(log)
    steps = program(log)
    assert steps is not None  # every block of DistributedDataParallel is simulated
    reading = replay(steps, plan.setup, plan.gpu.usable_memory_bytes if plan.gpu else None, hardware=plan.gpu)
    return PredictedPeaks(reading, live.peak_phase, log.events[live.phases[live.peak_phase].event].label)


_REDUCER_LABELS = ("initialize_buckets", "rebuild_buckets", "_broadcast_coalesced")
"""ddp.py: what DistributedDataParallel allocates in addition to the model."""


def without_reducer(log: Log) -> Log:
    """Return the log of DistributedDataParallel with nothing in what its Reducer allocates: the bare model."""
    its_own = {event.number for event in log.events if event.label in _REDUCER_LABELS}
    return replace(
        log,
        events=[
            msgspec.structs.replace(event, num_bytes=0) if event.number in its_own else event for event in log.events
        ],
    )


# -- comparing -------------------------------------------------------------------------------------------------------


def compare_published(cases: Iterable[PublishedCase] | None = None) -> list[PublishedRow]:
    """Return a row for each published peak, and one for each case without any; the packaged cases by default."""
    return [row for case in (read_cases() if cases is None else cases) for row in compare_case(case)]


def compare_case(case: PublishedCase) -> list[PublishedRow]:
    """Compare each published peak of one case with the predicted peak of its kind."""
    inputs = case.inputs
    about = PublishedRow(
        case=inputs.case,
        family=inputs.family,
        source=inputs.source,
        setup=describe(inputs),
        compiled=inputs.compiled == "yes",
    )
    if not case.measured:
        return [msgspec.structs.replace(about, reason="the source prints no memory")]
    plan = plan_case(inputs)
    blank = [msgspec.structs.replace(about, kind=peak.kind, measured_bytes=peak.num_bytes) for peak in case.measured]
    if isinstance(plan, Unpredictable):
        return [msgspec.structs.replace(row, reason=plan.reason) for row in blank]
    prediction = predict_case(plan)
    terms = terms_of(inputs.family, plan.model, plan.setup, plan.packed)
    return [_compare_peak(row, plan, prediction, terms) for row in blank]


def _compare_peak(row: PublishedRow, plan: Plan, prediction: PredictedPeaks, terms: tuple[Term, ...]) -> PublishedRow:
    measured = row.measured_bytes
    if row.kind not in PREDICTED_KINDS or measured is None:
        reason = "the source does not say which peak it is, or in which unit: compared with nothing"
        return msgspec.structs.replace(row, reason=reason)
    terms = tuple(term for term in terms if term.only in (None, row.kind))
    overflow = prediction.reading.out_of_memory
    if overflow is not None:
        reason = f"predicted for eager not to fit on the GPU: {overflow.label} in {overflow.phase}"
        return msgspec.structs.replace(row, terms=terms, assumptions=plan.assumptions, reason=reason)
    if prediction.reading.num_alloc_retries and row.kind == "max_reserved":
        reason = "predicted for eager to run with retries: what is reserved then is what the GPU has"
        return msgspec.structs.replace(row, terms=terms, assumptions=plan.assumptions, reason=reason)
    if prediction.peak_phase == "optimizer":
        terms = (*terms, ADAMW_NOT_STATED)
    predicted: int = getattr(prediction.reading, PREDICTED_KINDS[row.kind])
    added = _added(row.kind, prediction, plan, terms)
    total = None if added is None else predicted + added
    return msgspec.structs.replace(
        row,
        predicted_bytes=predicted,
        error=predicted / measured - 1,
        peak_at=f"{prediction.peak_phase}: {prediction.peak_operator}",
        terms=terms,
        with_terms_bytes=total,
        error_with_terms=None if total is None else total / measured - 1,
        assumptions=plan.assumptions,
    )


def _added(kind: str, prediction: PredictedPeaks, plan: Plan, terms: tuple[Term, ...]) -> int | None:
    """Return what the terms add to the peak, where their sizes are known.

    They are sizes of what is alive when the loss's backward begins. So they add up for a peak of live bytes that lies
    there, and neither for reserved memory, nor for compiled code, nor when a term has no known size.
    """
    if kind == "max_reserved" or plan.setup.compile or prediction.peak_operator != LOSS_BACKWARD:
        return None
    sizes = [term.num_bytes for term in terms]
    return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None
