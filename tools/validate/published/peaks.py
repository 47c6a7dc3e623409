"""Compares published with predicted peaks of memory, each kind only with the same kind; and what fitted.

A prediction is made from ``CaseInputs``, which contains no measurements. If a framework's code is known to save other
tensors than our models, the difference is a named term (terms.py). Terms are listed beside the prediction, not in it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.rates.communicators import communicators_of
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.terminal import wrapped
from fsdp_bench.report.text.prediction import retries_text
from fsdp_bench.simulate.operators.kernels import kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.units import GIB, format_gib
from tools.validate.published.cases import PublishedCase, cluster_of, describe, read_cases
from tools.validate.published.setups import Plan, plan_case
from tools.validate.published.terms import ADAMW_NOT_STATED, Term, terms_of

PREDICTED_KINDS = {
    "max_active": "peak_active_bytes",
    "max_allocated": "peak_allocated_bytes",
    "max_reserved": "peak_reserved_bytes",
}
"""For each published kind of peak, the field of AllocatorReading that it is compared with."""

LOSS_BACKWARD = "aten::_log_softmax_backward_data"
"""The operator at which the sizes of terms can be added up: all tensors that forward saved are alive then."""


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published peak and its prediction, or the reason why there is none."""

    case: str
    family: str
    source: str
    setup: str
    gpu: str = ""
    compiled: bool = False
    """Whether the published code was compiled. Predictions are for eager mode where compiled code is not recorded."""
    kind: str | None = None
    """The kind of peak. None if the source prints no memory."""
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    error: float | None = None
    """``predicted / measured - 1``."""
    peak_at: str | None = None
    """Phase and operator of the predicted peak of live bytes."""
    terms: tuple[Term, ...] = ()
    """Differences between the framework's code and our models."""
    with_terms_bytes: int | None = None
    """The prediction plus the sizes of its terms. None if they cannot be added up."""
    error_with_terms: float | None = None
    assumptions: tuple[str, ...] = ()
    reason: str | None = None
    """Why there is no prediction."""


@dataclass(frozen=True)
class PredictedPeaks:
    """The predicted peaks of one plan."""

    reading: AllocatorReading
    peak_phase: str
    peak_operator: str


# -- predicting ------------------------------------------------------------------------------------------------------


def predict_case(plan: Plan) -> PredictedPeaks:
    """Predict the peaks of a plan, in eager mode."""
    # The runs had what the GPU had.
    hardware = Hardware.of_gpu(plan.gpu) if plan.gpu else None
    # No published run had a torch that takes cuDNN's attention.
    steps = SimulatedSteps(plan.model, plan.setup, kernels_on(plan.kernels, plan.gpu, flash_alone=True))
    found = answer(Question(plan.model, plan.setup, hardware, headroom_bytes=0).with_steps(steps))
    return PredictedPeaks(found.allocator, found.memory.peak_phase, found.memory.peak_operator)


# -- comparing -------------------------------------------------------------------------------------------------------


def compare_published(cases: Iterable[PublishedCase] | None = None) -> list[PublishedRow]:
    """Return a row for each published peak, and one for each case without a peak; by default of the packaged cases."""
    return [row for case in (read_cases() if cases is None else cases) for row in compare_case(case)]


def compare_case(case: PublishedCase) -> list[PublishedRow]:
    """Compare each published peak of one case with the predicted peak of its kind."""
    inputs = case.inputs
    about = PublishedRow(
        case=inputs.case,
        family=inputs.family,
        source=inputs.source,
        setup=describe(inputs),
        gpu=inputs.gpu,
        compiled=inputs.compiled == "yes",
    )
    if not case.measured:
        return [msgspec.structs.replace(about, reason="the source prints no memory")]
    blank = [msgspec.structs.replace(about, kind=peak.kind, measured_bytes=peak.num_bytes) for peak in case.measured]
    try:
        plan = plan_case(inputs)
    except SpecError as error:
        return [msgspec.structs.replace(row, reason=str(error)) for row in blank]
    prediction = predict_case(plan)
    terms = terms_of(inputs.family, plan.model, plan.setup, plan.packed) if isinstance(plan.model, ModelShape) else ()
    return [_compare_peak(row, plan, prediction, terms) for row in blank]


def _compare_peak(row: PublishedRow, plan: Plan, prediction: PredictedPeaks, terms: tuple[Term, ...]) -> PublishedRow:
    measured = row.measured_bytes
    if row.kind not in PREDICTED_KINDS or measured is None:
        reason = "the source does not say which peak it is, or in which unit: compared with nothing"
        return msgspec.structs.replace(row, reason=reason)
    terms = tuple(term for term in terms if term.only in (None, row.kind))
    overflow = prediction.reading.out_of_memory
    if overflow is not None:
        reason = f"predicted not to fit on the GPU: {overflow.label} in {overflow.phase}"
        return msgspec.structs.replace(row, terms=terms, assumptions=plan.assumptions, reason=reason)
    if prediction.reading.num_alloc_retries and row.kind == "max_reserved":
        reason = "predicted to run with retries: what is reserved then is what the GPU has"
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
    """Return the bytes that the terms add to the peak. None if they cannot be added up.

    Sizes are of tensors alive when the loss's backward begins. So they can be added to a peak of live bytes at that
    moment, but not to reserved memory, for compiled code, or if the size of a term is not known.
    """
    if kind == "max_reserved" or plan.setup.compile or prediction.peak_operator != LOSS_BACKWARD:
        return None
    sizes = [term.num_bytes for term in terms]
    return sum(size for size in sizes if size is not None) if sizes and None not in sizes else None


# -- as text ----------------------------------------------------------------------------------------------------------


WITHIN = 0.05
"""The largest error of allocated and active memory that counts as near."""

HEADERS = ("case", "kind", "published", "predicted", "error", "with\nterms", "their\nerror")
DROPPABLE = ("with\nterms", "their\nerror")


def format_published(rows: Sequence[PublishedRow]) -> str:
    """Return the comparison as plain text.

    The column ``with terms`` is the prediction plus known terms of the framework's code: see published_terms.py.
    """
    predicted = [row for row in rows if row.predicted_bytes is not None]
    published = sum(row.kind is not None for row in rows)
    lines = [
        f"peaks of memory: {published} published, {len(predicted)} compared; GiB",
        "with terms: the prediction and what the framework's own code is known to keep beside it",
        "",
        *table_lines(table_columns(HEADERS, map(_cells, predicted), HEADERS[2:], DROPPABLE), indent=2),
    ]
    lines += ["", *(line for kind in PREDICTED_KINDS for line in _summary(kind, predicted))]
    lines += ["", *_by_publisher(predicted)]
    lines += ["", "what was predicted, and the terms that the prediction does not have:"]
    for case in dict.fromkeys(row.case for row in predicted):
        lines += _details([row for row in predicted if row.case == case])
    lines += ["", "where these terms stand:", *_sources(predicted)]
    lines += ["", *taken((row.family, row.assumptions) for row in predicted)]
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _cells(row: PublishedRow) -> list[str]:
    has_terms = row.with_terms_bytes is not None
    return [
        row.case,
        str(row.kind),
        _gib(row.measured_bytes),
        _gib(row.predicted_bytes),
        _percent(row.error),
        _gib(row.with_terms_bytes) if has_terms else "",
        _percent(row.error_with_terms) if has_terms else "",
    ]


def _details(rows: Sequence[PublishedRow]) -> list[str]:
    row = rows[0]
    lines = wrapped(f"  {row.case}: {row.setup}")
    lines += wrapped(f"      source: {row.source}; predicted peak in {row.peak_at}")
    for term in dict.fromkeys(term for peak in rows for term in peak.terms):
        size = "size unknown" if term.num_bytes is None else f"{term.num_bytes / GIB:+.3f} GiB"
        where = f" for {term.only} alone" if term.only else ""
        lines += wrapped(f"      term {size}{where}: {term.name} ({term.formula})")
    return lines


def _sources(rows: Sequence[PublishedRow]) -> list[str]:
    terms = dict.fromkeys((term.name, term.source) for row in rows for term in row.terms)
    return [line for name, source in terms for line in wrapped(f"  {name}: {source}")]


def _summary(kind: str, predicted: Sequence[PublishedRow]) -> list[str]:
    eager, compiled = (
        [row for row in predicted if row.kind == kind and row.compiled is flag] for flag in (False, True)
    )
    return [
        _errors(f"{kind}, eager", [row.error for row in eager]),
        _errors(f"{kind}, eager, with terms", [row.error_with_terms for row in eager]),
        _errors(f"{kind}, compiled", [row.error for row in compiled]),
    ]


def _by_publisher(predicted: Sequence[PublishedRow]) -> list[str]:
    """Return the errors of each publisher on each GPU, of all kinds of peaks together."""
    groups: dict[str, list[float | None]] = {}
    for row in predicted:
        groups.setdefault(f"{row.family} on {row.gpu}", []).append(row.error)
    return [_errors(name, errors) for name, errors in groups.items()]


def _errors(name: str, found: Sequence[float | None]) -> str:
    errors = [error for error in found if error is not None]
    if not errors:
        return f"  {name:<34}no peak"
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    within = sum(size <= WITHIN for size in sizes)
    return (
        f"  {name:<33} {len(errors)} peaks, median |error| {median(sizes):.1%}, worst {worst:+.1%},"
        f" {within} within {WITHIN:.0%}"
    )


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / GIB:.2f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def taken(rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return each assumption with the names of its rows, from pairs of a row's name and its assumptions."""
    found: dict[str, dict[str, None]] = {}
    for name, assumptions in rows:
        for fact in assumptions:
            found.setdefault(fact, {})[name] = None
    return ["taken:", *(line for fact, names in found.items() for line in wrapped(f"  {', '.join(names)}: {fact}"))]


def left_out(reasons: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the number of rows left out per reason, the most frequent first, from pairs of case and reason."""
    grouped: dict[str, list[str]] = {}
    for case, reason in reasons:
        if reason is not None:
            grouped.setdefault(reason, []).append(case)
    if not grouped:
        return ["left out: none"]
    total = sum(len(cases) for cases in grouped.values())
    lines = [f"left out: {total} (which ones: --json)"]
    for reason, cases in sorted(grouped.items(), key=lambda pair: -len(pair[1])):
        named = f": {cases[0]}" if len(cases) == 1 else ""
        lines += wrapped(f"  {len(cases):>3}  {reason}{named}")
    return lines


# -- Outcomes: fits, or out of memory ----------------------------------------------------------------------------------
#
# The caching allocator is replayed on the GPU that the source names. A run with allocation retries (cudaMalloc fails,
# cached blocks are freed, then it succeeds) continues more slowly: "runs with retries" is a third answer.


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
    gpu_bytes: int | None = None
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
    try:
        plan = plan_case(inputs)
        if plan.gpu is None or plan.gpu.usable_memory_bytes is None:
            raise SpecError(f"{inputs.gpu}: the source does not state the GPU's memory")
        cluster = cluster_of(inputs)
        communicators = communicators_of(plan.setup, cluster).num_bytes
        steps = SimulatedSteps(plan.model, plan.setup, kernels_on(plan.kernels, cluster.gpu, flash_alone=True))
        least = communicators.low if communicators else 0  # the least memory of NCCL
        found = answer(Question(plan.model, plan.setup, cluster, headroom_bytes=least).with_steps(steps))
    except SpecError as error:
        return msgspec.structs.replace(row, reason=str(error))
    return msgspec.structs.replace(
        row,
        predicted=found.verdict,
        reserved_bytes=found.allocator.peak_reserved_bytes,
        gpu_bytes=plan.gpu.usable_memory_bytes,
        num_alloc_retries=found.allocator.num_alloc_retries,
        num_retries_later=found.allocator.num_retries_later,
    )


def format_fits(rows: Sequence[FitRow]) -> str:
    """Return the comparison as plain text; compiled code has its own column."""
    compared = [row for row in rows if row.predicted is not None]
    columns = {
        "ran, eager": [row for row in compared if row.ran and not row.compiled],
        "ran, compiled": [row for row in compared if row.ran and row.compiled],
        "out of memory": [row for row in compared if not row.ran],
    }
    counts = [
        (fit.text, *(str(sum(row.predicted is fit for row in group)) for group in columns.values())) for fit in Verdict
    ]
    lines = [
        f"does it fit: {len(rows)} published outcomes, {len(compared)} compared; compiled code not recorded: as eager",
        "",
        *table_lines(table_columns(("predicted", *columns), counts, columns), indent=2),
    ]
    differing = [line for row in compared if row.ran != (row.predicted is Verdict.FITS) for line in _named(row)]
    if differing:
        lines += ["", "predicted to need retries, or otherwise than it went:", *differing]
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _named(row: FitRow) -> list[str]:
    assert row.predicted is not None
    outcome = "ran" if row.ran else "out of memory"
    compiled = ", compiled" if row.compiled else ""
    text = f"{row.case} ({outcome}{compiled}): {row.predicted.text}"
    if row.predicted is Verdict.RUNS_WITH_RETRIES:
        text += f": {retries_text(row.num_alloc_retries or 0, row.num_retries_later)}"
    if row.reserved_bytes is not None and row.gpu_bytes is not None:
        text += f"; {format_gib(row.reserved_bytes)} of {format_gib(row.gpu_bytes)} reserved at most"
    return wrapped(f"  {text}")
