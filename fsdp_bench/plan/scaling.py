"""scale_rates(): a datasheet's rates, changed so that a predicted step takes what a run of the user's own took."""

from dataclasses import dataclass
from datetime import date
from math import inf

from msgspec.structs import replace

from fsdp_bench.plan.measured_run import MeasuredRun
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.rates.datasheet import HOOK_SECONDS, LAUNCH_SECONDS
from fsdp_bench.rates.scaled import class_of, product_flops_per_second
from fsdp_bench.spec.calibration_profile import WORK_CLASSES, Scaling, WorkClass
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Api

_ROUNDS, _NEAR, _MOST_TIMES = 40, 1e-4, 64.0


@dataclass(frozen=True)
class ScaledRates:
    """A run's scaling, and what it changes in a step of the run's setup."""

    scaling: Scaling
    measured_step_seconds: float
    before: Speed
    after: Speed
    notes: tuple[str, ...]

    @property
    def changes(self) -> list[tuple[str, float, float, float]]:
        """Each class of work with its seconds by the datasheet, with the scaled rates, and the factor; the host's."""
        before, after = _classes(self.before), _classes(self.after)
        found = [(kind, before[kind], after[kind], one) for kind, one in self.scaling.factors.items() if before[kind]]
        own = self.scaling.launch_seconds
        host = [] if own is None else [("host, an operator", LAUNCH_SECONDS, own, own / LAUNCH_SECONDS)]
        return [*found, *host]


def scale_rates(asked: Question, run: MeasuredRun) -> ScaledRates:
    """Return rates with which the setup of a run takes what it took.

    Args:
        asked: the setup of the run, on its hardware, without a calibration.
        run: what was measured. Tokens per second or seconds give one factor for all work of the GPU and its links; a
            trace gives one for each class of kernels, and one for the host where the GPU waits for it.

    Raises:
        SpecError: if the setup's step has no predicted time, or no rates reach what was measured.
    """
    setup, where = asked.setup, asked.hardware
    if where is None:
        raise SpecError("calibrate: no GPU is named; --server NAME or --gpu NAME")
    before = _speed(asked, None)
    if before.time.step_seconds is None:
        raise SpecError(f"calibrate: the setup has no predicted time; unknown: {', '.join(before.time.unknown)}")
    scaling = Scaling(
        measured_on=date.today().isoformat(),
        source=run.source.replace("/s", "/s of all GPUs" if run.is_of_all_gpus else "/s per GPU"),
        gpu=where.gpu.name,
        datasheet_flops_per_second=product_flops_per_second(where.gpu),
        setup=f"{asked.model.name} on {where.name}: {setup_line(setup)}",
        num_nodes=where.num_nodes,
        is_compiled=setup.compiles,
        precision=f"{setup.precision.compute}, float8 {setup.float8}",
        factors=dict.fromkeys(WORK_CLASSES, 1.0),
    )
    measured = _step_seconds(asked, run, before)
    if run.class_seconds:
        scaling, notes = _by_class(asked, run, scaling)
        scaling, more = _with_host(asked, run, scaling, measured)
    else:
        scaling, more = _alike(asked, scaling, measured), []
        notes = ["one number cannot tell products from other work: all work of the GPU and its links is scaled alike"]
    return ScaledRates(scaling, measured, before, _speed(asked, scaling), (*notes, *more))


def _speed(asked: Question, scaling: Scaling | None) -> Speed:
    return speed(asked.simulated, asked.hardware, scaling, with_spans=True)


def _step(asked: Question, scaling: Scaling) -> float:
    return speed(asked.simulated, asked.hardware, scaling).time.step_seconds or inf


def _step_seconds(asked: Question, run: MeasuredRun, predicted: Speed) -> float:
    """Return the measured seconds of a step. Raises SpecError for a step faster than the GPU's peak."""
    tokens = asked.setup.tokens_per_step_per_rank * (asked.setup.world_size if run.is_of_all_gpus else 1)
    seconds = run.step_seconds or tokens / (run.tokens_per_second or 1.0)
    flops, peak = predicted.hardware_flops, predicted.peak_flops_per_second
    if flops and peak and flops / seconds > peak:
        times = f"{flops / seconds / peak:.1f} times the GPU's peak"
        raise SpecError(f"from: {run.source}: {times} with this setup; --total if the tokens/s are of all GPUs")
    return seconds


def _alike(asked: Question, scaling: Scaling, seconds: float) -> Scaling:
    """Return one factor for all classes, with which a step takes ``seconds``. Raises SpecError if none does."""
    factor = 1.0
    for _ in range(_ROUNDS):
        scaling = replace(scaling, factors=dict.fromkeys(WORK_CLASSES, factor))
        off = seconds / _step(asked, scaling)
        if abs(off - 1) < _NEAR:
            return scaling
        factor = min(max(factor * off, 1 / _MOST_TIMES), _MOST_TIMES)
    raise SpecError(
        f"calibrate: no rates up to {_MOST_TIMES:g} times higher or lower give the measured step of"
        f" {seconds * 1e3:.1f} ms: is this the run's setup? Where the host decides, calibrate --host measures it"
    )


def _classes(found: Speed) -> dict[WorkClass, float]:
    """Return the seconds of each class of kernels and copies in a step, one after another."""
    seconds = dict.fromkeys(WORK_CLASSES, 0.0)
    for span in found.time.spans:
        if span.kind != "host":
            others: dict[str, WorkClass] = {"collective": "communication", "copy": "copies"}
            seconds[others.get(span.kind) or class_of(span.work)] += span.end - span.begin
    return seconds


def _by_class(asked: Question, run: MeasuredRun, scaling: Scaling) -> tuple[Scaling, list[str]]:
    """Return the factors with which each class takes what its kernels took, where both have any."""
    measured, predicted = run.class_seconds, _classes(_speed(asked, None))
    both = [kind for kind in WORK_CLASSES if measured.get(kind) and predicted[kind]]
    factors = dict.fromkeys(both, 1.0)
    for _ in range(_ROUNDS):  # operators take longer beside collectives, so each factor changes the others
        now = _classes(_speed(asked, replace(scaling, factors=factors)))
        factors = {kind: factors[kind] * measured[kind] / now[kind] for kind in both}
        if all(abs(measured[kind] / now[kind] - 1) < _NEAR for kind in both):
            break
    notes = ["kernels of NCCL also wait for other ranks, which is in their factor; the profiler slows the host down"]
    for kind in WORK_CLASSES:
        if kind not in both and (measured.get(kind) or predicted[kind]):
            where = "predicted" if predicted[kind] else "in the trace"
            notes.append(f"{kind.replace('_', ' ')}: {where} only, so not scaled")
    return replace(scaling, factors=factors), notes


def _with_host(asked: Question, run: MeasuredRun, scaling: Scaling, seconds: float) -> tuple[Scaling, list[str]]:
    """Return the host's times with which the step takes as long, where the trace shows the GPU waiting for it."""

    def slower(times: float) -> Scaling:
        hooks = {api.value: HOOK_SECONDS * times for api in Api}
        return replace(scaling, launch_seconds=LAUNCH_SECONDS * times, hook_seconds=hooks)

    idle = f"{run.idle_seconds * 1e3:.1f} ms of a step in which the GPU does nothing"
    if _step(asked, scaling) >= seconds or run.idle_seconds <= 0:
        return scaling, []
    low, high = 1.0, _MOST_TIMES
    if _step(asked, slower(high)) < seconds:
        return scaling, [f"no host's time explains {idle}"]
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if _step(asked, slower(middle)) < seconds else (low, middle)
    return slower(high), [f"the host: {idle} show it"]
