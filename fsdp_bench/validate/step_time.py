"""Compares predicted with measured time: steps, exposed communication, and the order of strategies by speed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.estimate import KERNELS
from fsdp_bench.plan.speed import speed
from fsdp_bench.replay.schedule import StepTime
from fsdp_bench.simulate.operators.kernels import kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import label_of
from fsdp_bench.validate.predictable import cell_label, predictable_model

EXPOSED_WITHIN, OF_THE_STEP = 0.20, 0.05
"""Predicted exposed communication is near if the error is at most one of these fractions: of the measured exposed
communication, or of the step."""

LEAST_STEPS = 2
"""The fewest measured steps that are compared. A single one, as in searches of largest models, may be an outlier."""


class TimeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured step time of one trial, or the reason why they are not compared."""

    label: str
    family: str = ""
    """A key that is equal for trials that differ only in strategy, shard groups and api."""
    strategy: str = ""
    shard_group_size: int | None = None
    """None where the strategy has no shard groups."""
    api: str = ""
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    """The median step time of the slowest rank."""
    fastest_seconds: float | None = None
    slowest_seconds: float | None = None
    predicted_exposed_seconds: float | None = None
    exposed_by_difference_seconds: float | None = None
    exposed_by_profiler_seconds: float | None = None
    """The exposed fraction of a profiled step, times ``measured_seconds``."""
    reason: str | None = None

    @property
    def sharding(self) -> tuple[str, int | None]:
        """The strategy; of a hybrid one with the size of its shard groups."""
        return self.strategy, self.shard_group_size

    @property
    def fastest(self) -> float:
        """The fastest measured step of a compared trial, in seconds."""
        return self.fastest_seconds or 0.0

    @property
    def slowest(self) -> float:
        """The slowest measured step of a compared trial, in seconds."""
        return self.slowest_seconds or 0.0

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``."""
        if self.predicted_seconds is None or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds - 1

    def exposed_is_near(self, measured: float | None) -> bool | None:
        """Return whether predicted exposed seconds are near the measured ones. None if either is missing."""
        if measured is None or self.predicted_exposed_seconds is None or self.measured_seconds is None:
            return None
        allowed = max(EXPOSED_WITHIN * measured, OF_THE_STEP * self.measured_seconds)
        return abs(self.predicted_exposed_seconds - measured) <= allowed

    def exposed_error(self, measured: float | None) -> float | None:
        """Return the relative error of exposed seconds; None without both, or if a difference is not positive."""
        if measured is None or measured <= 0 or self.predicted_exposed_seconds is None:
            return None
        return abs(self.predicted_exposed_seconds - measured) / measured


class SpeedOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Number of pairs of trials whose measured steps do not overlap, and of pairs predicted in the same order."""

    num_pairs: int
    num_in_order: int


class TimeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and errors of many comparisons."""

    num_trials: int
    not_compared: dict[str, int]
    """The number of trials whose time is not compared, by reason."""
    median_error: float | None
    """The median of the absolute errors of step time."""
    median_bias: float | None
    num_within: int
    """Trials whose step time is predicted within 15 %."""
    num_exposed: int
    """Trials with exposed communication measured in both ways."""
    num_exposed_near_difference: int
    num_exposed_near_profiler: int
    num_exposed_near_either: int
    num_with_exposed_by_difference: int
    """Trials with positive measured exposed communication, so that there is a relative error."""
    num_with_exposed_by_profiler: int
    median_exposed_error_by_difference: float | None
    """The median of the absolute relative errors of exposed communication."""
    median_exposed_error_by_profiler: float | None
    strategies: SpeedOrder
    """Pairs of trials with different strategies, or hybrids with different shard groups."""
    apis: SpeedOrder
    """Pairs of trials with fsdp1 and fsdp2 and the same strategy."""


def compare_time(record: TrialRecord, profile: Profile | None) -> TimeComparison:
    """Predict the time of a measured trial."""
    label = f"{record.id} {cell_label(record.model, record.setup)}"
    reason = _why_not(record, profile)
    if reason is not None:
        return TimeComparison(label=label, reason=reason)
    kernels = "cpu" if record.hardware == "cpu" else "cuda"
    gpu = gpu_by_product_name(record.ranks[0].device_name) if kernels == "cuda" else None
    hardware, is_alone = Hardware.of_gpu(gpu) if gpu else None, record.device == "emulated"
    try:
        model = predictable_model(record)
        steps = SimulatedSteps(model, record.setup, kernels_on(KERNELS[kernels], gpu))
        found = speed(steps, hardware, profile, without_communication=is_alone)
    except (SpecError, MachineError) as error:
        return TimeComparison(label=label, reason=f"not predicted: {error}")
    if found.time.step_seconds is None:
        return TimeComparison(label=label, reason=f"unknown: {', '.join(found.time.unknown)}")
    return _compared(record, found.time, label)


def _why_not(record: TrialRecord, profile: Profile | None) -> str | None:
    if record.source == "rehearsed":
        return "rehearsed, which takes no time"
    if record.outcome is not Outcome.OK or record.step_seconds is None:
        return f"the trial ended {record.outcome.value}"
    if record.setup.compile or (record.setup.compiles and record.hardware == "cpu"):
        return "compiled code; the prediction is for eager"
    if record.run.steps < LEAST_STEPS:
        return "one measured step, which has no spread"
    if record.num_nodes > 1:
        return f"it ran on {record.num_nodes} nodes, and nothing says what network joins them"
    if profile is None and record.hardware == "cpu":
        return "no datasheet has a CPU's rates; give --calibration FILE, which fsdp-bench calibrate writes"
    return None if profile is None else calibration_mismatch(profile, record)


def _compared(record: TrialRecord, time: StepTime, label: str) -> TimeComparison:
    setup, seconds = record.setup, record.step_seconds
    assert seconds is not None
    steps = [max(step) for step in zip(*(rank.step_seconds for rank in record.ranks), strict=False)]
    fractions = record.exposed_fractions
    common = msgspec.structs.replace(setup, strategy="FULL_SHARD", api="fsdp1", shard_size=None)
    return TimeComparison(
        label=label,
        family=to_json((record.model, common)).decode(),
        strategy=setup.strategy.value,
        shard_group_size=setup.shard_group_size if setup.strategy.is_hybrid else None,
        api=setup.api.value,
        predicted_seconds=time.step_seconds,
        measured_seconds=seconds,
        fastest_seconds=min(steps),
        slowest_seconds=max(steps),
        predicted_exposed_seconds=time.exposed_communication_seconds,
        exposed_by_difference_seconds=record.exposed_by_difference_seconds,
        exposed_by_profiler_seconds=fractions[0] * seconds if fractions else None,
    )


def summarize_time(comparisons: Sequence[TimeComparison]) -> TimeSummary:
    """Summarize comparisons: numbers, median errors, order of strategies."""
    errors = [one.error for one in comparisons if one.error is not None]
    near = [
        (one.exposed_is_near(one.exposed_by_difference_seconds), one.exposed_is_near(one.exposed_by_profiler_seconds))
        for one in comparisons
    ]
    both = [(difference, profiler) for difference, profiler in near if difference is not None and profiler is not None]
    pairs = list(_distinct_pairs(comparisons))
    exposed = [
        [error for one in comparisons if (error := one.exposed_error(getattr(one, name))) is not None]
        for name in ("exposed_by_difference_seconds", "exposed_by_profiler_seconds")
    ]
    differences, profiled = exposed
    return TimeSummary(
        num_trials=len(errors),
        not_compared=dict(Counter(one.reason for one in comparisons if one.reason is not None)),
        median_error=median(map(abs, errors)) if errors else None,
        median_bias=median(errors) if errors else None,
        num_within=sum(abs(error) <= 0.15 for error in errors),
        num_exposed=len(both),
        num_exposed_near_difference=sum(difference for difference, _ in both),
        num_exposed_near_profiler=sum(profiler for _, profiler in both),
        num_exposed_near_either=sum(difference or profiler for difference, profiler in both),
        num_with_exposed_by_difference=len(differences),
        num_with_exposed_by_profiler=len(profiled),
        median_exposed_error_by_difference=median(differences) if differences else None,
        median_exposed_error_by_profiler=median(profiled) if profiled else None,
        strategies=_order((one, other) for one, other in pairs if one.sharding != other.sharding),
        apis=_order((one, other) for one, other in pairs if one.sharding == other.sharding),
    )


def _order(pairs: Iterable[tuple[TimeComparison, TimeComparison]]) -> SpeedOrder:
    right = [(faster.predicted_seconds or 0.0) < (slower.predicted_seconds or 0.0) for faster, slower in pairs]
    return SpeedOrder(num_pairs=len(right), num_in_order=sum(right))


def _distinct_pairs(comparisons: Sequence[TimeComparison]) -> Iterable[tuple[TimeComparison, TimeComparison]]:
    """Yield pairs that differ only in sharding or api and whose measured steps do not overlap, the faster trial first.

    The steps of repeated runs of a trial are joined, because two runs can differ more than the steps of one run.
    """
    families: dict[str, dict[tuple[object, ...], TimeComparison]] = defaultdict(dict)
    for one in comparisons:
        if one.error is not None:
            family, name = families[one.family], (*one.sharding, one.api)
            again = family.get(name, one)
            fastest, slowest = min(one.fastest, again.fastest), max(one.slowest, again.slowest)
            family[name] = msgspec.structs.replace(again, fastest_seconds=fastest, slowest_seconds=slowest)
    for family in families.values():
        for one, other in combinations(family.values(), 2):
            if one.slowest < other.fastest:
                yield one, other
            elif other.slowest < one.fastest:
                yield other, one


def calibration_mismatch(profile: Profile, record: TrialRecord) -> str | None:
    """Return why a calibration does not apply to a trial; None if it does.

    GPUs must have the same name. CPU names are not compared, because records contain only the CPU's architecture.
    """
    if profile.device != record.hardware:
        return f"the calibration is of {profile.machine}"
    gpus = {rank.device_name for rank in record.ranks}
    if profile.device == "cuda" and gpus != {profile.device_name}:
        return f"the calibration is of {profile.device_name}, the trial ran on {', '.join(sorted(gpus)) or 'no GPU'}"
    if record.emulated_on == "cpu" and profile.for_ranks(1).num_ranks != 1:
        alone = "the trial ran one process on all cores, and the calibration's ranks shared them"
        return f"{alone}; fsdp-bench calibrate --ranks 1 measures one"
    return None


# -- Model FLOP/s against the machine's fastest matrix product, an upper bound -----------------------------------------


class MatrixRate(msgspec.Struct, frozen=True, kw_only=True):
    """For one compute dtype: the fastest measured matrix product, and the trial with the most model FLOP/s."""

    dtype: str
    matmul_flops_per_second: float
    """FLOP/s of the fastest matrix product in the calibration, with the number of ranks nearest to the trial's."""
    model_flops_per_second: float
    trial: str
    mfu: float | None
    """MFU of that trial: model FLOP/s over the dense peak of the datasheet."""

    @property
    def fraction(self) -> float:
        """The trial's model FLOP/s over the FLOP/s of the matrix product."""
        return self.model_flops_per_second / self.matmul_flops_per_second


def matrix_rates(records: Sequence[TrialRecord], profile: Profile) -> list[MatrixRate]:
    """Return a rate by compute dtype and emulation. Raises SpecError if the calibration fits no trial."""
    reasons = {record.id: calibration_mismatch(profile, record) for record in records}
    measured = [record for record in records if record.model_flops_per_second]
    trained = [record for record in measured if reasons[record.id] is None]
    if measured and not trained:
        raise SpecError(f"--calibration: of another machine than the trials: {reasons[measured[0].id]}")
    groups = dict.fromkeys((record.setup.precision.compute, record.device) for record in trained)
    found = [
        _rate([one for one in trained if (one.setup.precision.compute, one.device) == group], profile)
        for group in groups
    ]
    return [rate for rate in found if rate is not None]


def _rate(trained: Sequence[TrialRecord], profile: Profile) -> MatrixRate | None:
    best = max(trained, key=lambda record: record.model_flops_per_second or 0.0)
    dtype = best.setup.precision.compute
    products = [one for one in profile.for_ranks(len(best.ranks)).matmul if one.dtype == dtype]
    if not products or not best.model_flops_per_second:
        return None
    return MatrixRate(
        dtype=dtype,
        matmul_flops_per_second=max(2 * one.m * one.n * one.k / one.seconds for one in products),
        model_flops_per_second=best.model_flops_per_second,
        trial=f"{best.id} {label_of(best.model, best.setup, alone=best.alone)}",
        mfu=best.mfu,
    )
