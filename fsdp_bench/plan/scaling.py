"""scale_rates(): a datasheet's rates, changed so that a predicted step takes what a run of the user's own took."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from msgspec.structs import replace

from fsdp_bench.plan.measured_run import MeasuredRun
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.plan.ranges import Range
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.datasheet import HOOK_SECONDS, LAUNCH_SECONDS
from fsdp_bench.rates.scaled import class_of, product_flops_per_second
from fsdp_bench.spec.calibration_profile import WORK_CLASSES, Scaling, WorkClass
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Api, Float8

HOST = "host"
_ROUNDS, _NEAR = 40, 1e-4
_MOST_TIMES = 64.0


@dataclass(frozen=True)
class Change:
    """What a run changes of one class of work: its seconds in a step of the run's setup."""

    name: WorkClass | str
    before_seconds: float
    after_seconds: float
    factor: float


@dataclass(frozen=True)
class ScaledRates:
    """A run's scaling, and what it changes."""

    scaling: Scaling
    measured_step_seconds: float
    before_step_seconds: float
    after_step_seconds: float
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    range_before: Range | None
    range: Range | None
    """The range of the speed of another step like the run's."""


def scale_rates(asked: Question, run: MeasuredRun) -> ScaledRates:
    """Return rates with which the setup of a run takes what it took.

    Args:
        asked: the setup of the run, on its hardware, without a calibration.
        run: what was measured. Tokens per second or seconds give one factor for all work of the GPU and its links; a
            trace gives one for each class of kernels, and one for the host where the GPU waits for it.

    Raises:
        SpecError: if the setup's step has no predicted time, or no rates reach what was measured.
    """
    if asked.hardware is None:
        raise SpecError("calibrate: no GPU is named; --server NAME or --gpu NAME")
    before = speed_of(asked)
    predicted = before.time.step_seconds
    if predicted is None:
        raise SpecError(f"calibrate: the setup has no predicted time: unknown: {', '.join(before.time.unknown)}")
    measured = _step_seconds(asked, run, before)
    recipe = asked.setup.float8
    scaling = Scaling(
        measured_on=date.today().isoformat(),
        source=run.source,
        gpu=asked.hardware.gpu.name,
        datasheet_flops_per_second=product_flops_per_second(asked.hardware.gpu),
        setup=f"{asked.model.name} on {asked.hardware.name}: {setup_line(asked.setup)}",
        num_nodes=asked.hardware.num_nodes,
        is_compiled=asked.setup.compiles,
        compute=asked.setup.precision.compute + ("" if recipe is Float8.NONE else f" {recipe}"),
        factors=dict.fromkeys(WORK_CLASSES, 1.0),
    )
    notes = ["one number cannot tell products from other work: all work of the GPU and its links is scaled alike"]
    if run.class_seconds:
        scaling, notes = _by_class(asked, run, scaling)
        scaling, more = _with_host(asked, run, scaling, measured)
        notes += more
    else:
        alike = _factor(lambda factor: _step(asked, _alike(scaling, factor)), measured)
        scaling = _alike(scaling, alike)
    after = _speed(asked, scaling)
    assert after.time.step_seconds is not None
    return ScaledRates(scaling, measured, predicted, after.time.step_seconds, _changes(asked, scaling), tuple(notes),
                       before.range, after.range)  # fmt: skip


def _step_seconds(asked: Question, run: MeasuredRun, predicted: Speed) -> float:
    """Return the measured seconds of a step. Raises SpecError for a step faster than the GPU's peak."""
    seconds = run.step_seconds
    if run.tokens_per_second is not None:
        each = run.tokens_per_second / (asked.setup.world_size if run.is_of_all_gpus else 1)
        seconds = asked.setup.tokens_per_step_per_rank / each
    assert seconds is not None
    flops, peak = predicted.hardware_flops, predicted.peak_flops_per_second
    if flops is not None and peak is not None and flops / seconds > peak:
        raise SpecError(
            f"from: {run.source}: {flops / seconds / peak:.1f} times the GPU's peak with this setup; --total if the"
            " tokens/s are those of all GPUs together"
        )
    return seconds


def _speed(asked: Question, scaling: Scaling, with_spans: bool = False) -> Speed:
    return speed(asked.simulated, asked.hardware, scaling, with_spans)


def _step(asked: Question, scaling: Scaling) -> float:
    return _speed(asked, scaling).time.step_seconds or 0.0


def _alike(scaling: Scaling, factor: float) -> Scaling:
    return replace(scaling, factors=dict.fromkeys(scaling.factors, factor))


def _factor(takes: Callable[[float], float], seconds: float) -> float:
    """Return the factor with which a step takes ``seconds``. Raises SpecError if none does."""
    factor = 1.0
    for _ in range(_ROUNDS):
        took = takes(factor)
        if abs(took / seconds - 1) < _NEAR:
            return factor
        factor *= seconds / took
        if not 1 / _MOST_TIMES < factor < _MOST_TIMES:
            break
    raise SpecError(
        f"calibrate: the measured step of {seconds * 1e3:.1f} ms is not reached with rates {_MOST_TIMES:g} times higher"
        " or lower: is this the setup of the run? Where the host decides, calibrate --host measures it"
    )


def _classes(asked: Question, scaling: Scaling | None) -> dict[WorkClass, float]:
    """Return the predicted seconds of each class of kernels and copies in a step, one after another."""
    found = dict.fromkeys(WORK_CLASSES, 0.0)
    for span in speed(asked.simulated, asked.hardware, scaling, with_spans=True).time.spans:
        if span.kind != "host":
            others: dict[str, WorkClass] = {"collective": "communication", "copy": "copies"}
            found[others.get(span.kind) or class_of(span.work)] += span.end - span.begin
    return found


def _by_class(asked: Question, run: MeasuredRun, scaling: Scaling) -> tuple[Scaling, list[str]]:
    """Return the factors with which each class takes what its kernels took, where both have any."""
    measured, predicted = run.class_seconds, _classes(asked, None)
    both = [kind for kind in WORK_CLASSES if measured.get(kind, 0.0) > 0 and predicted[kind] > 0]
    scaling = replace(scaling, factors=dict.fromkeys(both, 1.0))
    for _ in range(_ROUNDS):  # operators take longer beside collectives, so each factor changes the others
        now = _classes(asked, scaling)
        off = {kind: measured[kind] / now[kind] for kind in both}
        scaling = replace(scaling, factors={kind: scaling.factors[kind] * off[kind] for kind in both})
        if all(abs(one - 1) < _NEAR for one in off.values()):
            break
    notes = ["kernels of NCCL also wait for other ranks, which is in their factor; the profiler slows the host down"]
    for kind in WORK_CLASSES:
        if kind not in both and (measured.get(kind, 0.0) > 0 or predicted[kind] > 0):
            where = "predicted only" if predicted[kind] > 0 else "in the trace only"
            notes.append(f"{kind.replace('_', ' ')}: {where}, so not scaled")
    return scaling, notes


def _with_host(asked: Question, run: MeasuredRun, scaling: Scaling, seconds: float) -> tuple[Scaling, list[str]]:
    """Return the host's times with which the step takes as long, where the trace shows the GPU waiting for it."""

    def slower(times: float) -> Scaling:
        hooks = {api.value: HOOK_SECONDS * times for api in Api}
        return replace(scaling, launch_seconds=LAUNCH_SECONDS * times, hook_seconds=hooks)

    idle = f"{run.idle_seconds * 1e3:.1f} ms of a step in which the GPU does nothing"
    if _step(asked, scaling) >= seconds or run.idle_seconds <= 0:
        return scaling, []
    if _step(asked, slower(_MOST_TIMES)) < seconds:
        return scaling, [f"no host's time explains {idle}"]
    low, high = 1.0, _MOST_TIMES
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if _step(asked, slower(middle)) < seconds else (low, middle)
    return slower(high), [f"the host's time is what {idle} show"]


def _changes(asked: Question, scaling: Scaling) -> tuple[Change, ...]:
    before, after = _classes(asked, None), _classes(asked, scaling)
    found = [Change(kind, before[kind], after[kind], one) for kind, one in scaling.factors.items() if before[kind]]
    if scaling.launch_seconds is not None:
        found.append(Change(HOST, LAUNCH_SECONDS, scaling.launch_seconds, scaling.launch_seconds / LAUNCH_SECONDS))
    return tuple(found)
