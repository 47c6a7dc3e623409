"""Measured results as tables: one row for each trial, with conclusion and footnotes; communication by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_bench.report import terminal
from fsdp_bench.report.charts.trial_facts import facts, phrase
from fsdp_bench.report.table import Column, numbers, table_lines, titled, words
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.speed import step_text
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.units import format_gib, format_seconds
from fsdp_bench.sweep.results.flat import kinds_of, most_of_any_rank, trial_labels
from fsdp_bench.validate.step_time import MatrixRate

if TYPE_CHECKING:
    from rich.console import Console


def conclusion(records: Sequence[TrialRecord]) -> str:
    """Return one sentence about the trials that fit, for the most frequent model, device and world size.

    Memory is peak allocated on the worst rank; speed is tokens per second per rank.
    """
    compared = comparable(records)
    if not compared:
        return f"Found: {nothing_fits(records)}."
    shared = what_is_shared(compared)
    if len(compared) == 1:
        return f"Found: one trial fits, {shared}: {_setting(compared[0], [])}."
    return f"Found for {shared}: {'; '.join(findings(compared)) or 'nothing was measured'}."


def nothing_fits(records: Sequence[TrialRecord]) -> str:
    """Return how trials ended of which none fits."""
    counts = Counter("ok, with retries" if r.outcome is Outcome.OK else r.outcome.value for r in records)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"no trial fits ({outcomes or 'none ran'})"


def what_is_shared(compared: Sequence[TrialRecord]) -> str:
    """Return the model and the world size of comparable trials."""
    return f"{compared[0].model.name} on {phrase('world_size', compared[0].setup.world_size)}"


def findings(compared: list[TrialRecord]) -> list[str]:
    """Return what takes the least memory, and what is the fastest, of comparable trials; what is not known is left out.

    For a single trial this is its setting.
    """
    if len(compared) == 1:
        return [f"one trial fits, {_setting(compared[0], [])}"]
    found = []
    if known := by_memory(compared):
        least, most = known[0], known[-1]
        found.append(
            f"{_setting(least, compared)} takes the least memory, {format_gib(peak_of(least))} per rank,"
            f" {peak_of(least) / peak_of(most):.0%} of {_setting(most, compared)}"
        )
    if known := by_speed(compared):
        fastest, slowest = known[-1], known[0]
        found.append(
            f"{_setting(fastest, compared)} is the fastest, {speed_of(fastest):,.0f} tokens/s per rank,"
            f" {speed_of(fastest) / speed_of(slowest):.1f} times {_setting(slowest, compared)}"
        )
    return found


def comparable(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that fit, of the most frequent combination of model, device and world size."""
    fitting = [record for record in records if record.fits]

    def key(record: TrialRecord) -> tuple[object, ...]:
        return record.model, record.device, record.setup.world_size

    counts = Counter(map(key, fitting))
    return [record for record in fitting if key(record) == counts.most_common(1)[0][0]]


def by_memory(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials whose peak is known, the one with the least memory first."""
    known = (record for record in records if peak_of(record))
    return sorted(known, key=lambda record: (peak_of(record), record.step_seconds or 0.0))


def peak_of(record: TrialRecord) -> int:
    """Return the peak allocated bytes of the worst rank; 0 if unknown."""
    memory = record.worst_rank_memory
    return (memory.peak_allocated_bytes or 0) if memory else 0


def by_speed(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials whose speed is known, the slowest first."""
    return sorted((record for record in records if speed_of(record)), key=speed_of)


def speed_of(record: TrialRecord) -> float:
    """Return the tokens per second of one rank; 0 if unknown."""
    return record.tokens_per_second_per_gpu or 0.0


def _setting(record: TrialRecord, compared: list[TrialRecord]) -> str:
    """Return the strategy, and every other option that differs between the compared trials: ``FULL_SHARD fsdp2``."""
    own = facts(record)
    differ = [field for field, value in own.items() if any(facts(other)[field] != value for other in compared)]
    named = [field for field in differ if field != "model" and own[field] is not None]
    return " ".join([record.setup.strategy.value, *(phrase(field, own[field]) for field in named)])


DISAGREEMENT = 0.1
"""Largest difference between the two measurements of exposed communication, as a fraction of the step.

A trial with a larger difference is marked. The measurements are by the profiler and by steps without communication."""


def strategy_text(record: TrialRecord) -> str:
    """Return the requested strategy, and the effective one if that differs."""
    requested, effective = record.setup.strategy.value, record.effective_strategy
    return requested if effective == requested else f"{requested} (ran {effective})"


def outcome_text(record: TrialRecord) -> str:
    """Return how a trial ended."""
    return record.outcome.value if record.fits or record.outcome is not Outcome.OK else "ok, with retries"


def world_text(record: TrialRecord) -> str:
    """Return the number of ranks, and whether rank 0 ran alone."""
    return f"{record.setup.world_size} {record.alone}".rstrip()


_SETTINGS: dict[str, Callable[[TrialRecord], str]] = {
    "strategy": strategy_text,
    "model": lambda r: r.model.name,
    "world\nsize": world_text,
}
"""The first columns: the header, and the function that returns the cell of a trial."""


class Finding(NamedTuple):
    """A measurement that tables of trials have a column for."""

    value: Callable[[TrialRecord], Any]
    form: Callable[[Any], str] = str
    drop_priority: int = 0
    mark: Callable[[TrialRecord], str] = lambda record: ""

    def text(self, record: TrialRecord) -> str:
        """Return the cell of a trial."""
        value = self.value(record)
        return UNKNOWN if value is None else f"{self.form(value)}{self.mark(record)}"


def _worst(name: str) -> Callable[[TrialRecord], Any]:
    return lambda record: getattr(record.worst_rank_memory, name, None) or None


_FINDINGS = {
    "outcome": Finding(outcome_text),
    "peak\nallocated": Finding(_worst("peak_allocated_bytes"), format_gib),
    "in phase": Finding(_worst("peak_phase"), drop_priority=3),
    "reserved": Finding(lambda record: most_of_any_rank(record, "peak_reserved_bytes")[0], format_gib, 2),
    "step": Finding(lambda record: record.step_seconds, step_text, 5),
    "tokens/s\nper rank": Finding(lambda record: record.tokens_per_second_per_gpu or None, "{:,.0f}".format),
    "MFU": Finding(lambda record: record.mfu, "{:.1%}".format, 1),
    "comm.\ntotal": Finding(lambda record: record.communication_seconds, step_text, 6),
    "comm.\nexposed": Finding(
        lambda record: record.exposed_communication_seconds, step_text, 4, lambda r: "*" if disagrees(r) else ""
    ),
}
"""Measurements by the header of their column."""
WORDS = ("outcome", "in phase")
"""Headers of columns that are not of numbers."""

_MEMORY = ("outcome", "peak\nallocated", "in phase", "reserved")
"""Columns of trials that were all rehearsed, which has no times."""


def print_table(records: list[TrialRecord], console: Console) -> None:
    """Print the conclusion and one row per trial that ran, sorted by model, world size and memory."""
    ran = sorted((record for record in records if record.outcome is not Outcome.SKIPPED), key=_order)
    counts = Counter(record.outcome.value for record in ran)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    kind = "live tensor bytes" if any(r.hardware == "cpu" for r in ran) else "torch.cuda.max_memory_allocated"
    sources = dict.fromkeys(record.source for record in ran) or ("measured",)
    times = ", times are medians" if "measured" in sources else ""
    title = (
        f"{' and '.join(sources)}: {len(ran)} trials ({outcomes}); peak allocated is {kind} of the worst rank{times}"
    )
    beginning = [conclusion(ran), ""] if ran else []
    terminal.note_lines(console, [*beginning, title, *_tables(ran, console.width), *_footnotes(records, ran)])


def _tables(ran: list[TrialRecord], width: int) -> list[str]:
    groups: dict[str, list[TrialRecord]] = {}
    for record in ran:
        groups.setdefault(f"{record.model.name}, world size {world_text(record)}", []).append(record)
    if len(groups) < 2:
        return table_lines(trial_columns(ran), width) if ran else []
    lines = []
    for name, records in groups.items():
        lines += ["", f"{name}:", *table_lines(trial_columns(records, ("model", "world\nsize")), width)]
    return [*lines, ""]


def trial_columns(ran: Sequence[TrialRecord], without: tuple[str, ...] = ()) -> list[Column]:
    """Return a column for each setting that trials have or differ in, and for each of what was measured."""
    settings = [Column(header, tuple(map(cell, ran))) for header, cell in _SETTINGS.items() if header not in without]
    setups = [record.setup for record in ran]
    for one in (one for one in FIELDS.values() if one.has_column):
        values = [getattr(setup, one.name) for setup in setups]
        if one.labelled or one.is_size or len(set(values)) > 1:
            settings.append(Column(one.column or one.title.replace(" ", "\n"), tuple(map(one.text, values))))
    has_times = any(record.source != "rehearsed" for record in ran)
    findings = [
        Column(
            header,
            tuple(map(one.text, ran)),
            is_number := header not in WORDS,
            one.drop_priority,
            values=tuple(map(one.value, ran)) if is_number else (),
            warnings=tuple(not record.fits for record in ran) if header == "outcome" else (),
        )
        for header, one in _FINDINGS.items()
        if has_times or header in _MEMORY
    ]
    return [*settings, *findings]


def _order(record: TrialRecord) -> tuple[object, ...]:
    peak = most_of_any_rank(record, "peak_allocated_bytes")[0] or 0
    place = record.num_parameters, record.model.name, record.setup.world_size
    return *place, record.outcome is not Outcome.OK, peak, record.step_seconds or 0


def _footnotes(records: list[TrialRecord], ran: list[TrialRecord]) -> list[str]:
    skipped = Counter(record.reason for record in records if record.outcome is Outcome.SKIPPED)
    lines = [f"skipped {count}: {reason}" for reason, count in skipped.items()]
    if any(map(disagrees, ran)):
        lines.append(
            "* by the profiler; steps without communication save another part of the step, by more than 10 points"
            " (fsdp-bench report RESULTS --communication)"
        )
    if any(record.device == "emulated" for record in ran):
        lines.append(
            "emulated: rank 0 of the world, alone; collectives end at once, so that its steps, tokens/s and MFU are the"
            " job's compute, without communication"
        )
    for gpu in dict.fromkeys(record.run.rehearsed_on for record in ran if record.run.rehearsed_on is not None):
        lines.append(
            f"rehearsed: rank 0 of the world in PyTorch's CUDA build on a stand-in for NVIDIA's libraries, as on"
            f" {gpu.product_name} with {format_gib(gpu.available_bytes)} for torch; kernels do nothing: no times"
        )
    lines += [f"suspect {record.id}: {suspicion}" for record in ran for suspicion in record.suspect]
    peaks = {(record.peak_flops_per_second or 0, record.peak_flops_source): None for record in ran}
    lines += [
        "MFU = model FLOPs (3 x forward, attention causal, no recomputation) / seconds / dense peak"
        f" {peak / 1e12:.4g} TFLOP/s ({source})"
        for peak, source in peaks
        if source
    ]
    return [*lines, *dict.fromkeys(f"{record.model.name}: {record.model.describe()}" for record in ran)]


def disagrees(record: TrialRecord) -> bool:
    """Whether the two measurements of exposed communication differ by more than DISAGREEMENT."""
    return (record.exposed_disagreement or 0.0) > DISAGREEMENT


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else format_seconds(value)


LEGEND = (
    "exposed: time in which a collective ran and no compute did; by the profiler, with its part of the profiled step,"
    " and by difference: the step less the same step where collectives end at once; ! where the parts are more than 10"
    " points apart",
    "bytes: of whole messages (an all-gather's output, a reduce-scatter's input); bus bandwidth: bytes / seconds as"
    " nccl-tests' busbw, times (n - 1) / n, twice that for all-reduce",
    "seconds of a kind: the median over profiled steps, of the rank with the most, which waited longest for its peers:"
    " kinds may add up to more than the total, and bus bandwidth is less than the links'; copies are in no total",
)


def print_communication(records: list[TrialRecord], console: Console) -> None:
    """Print one line of times per trial, and one row per kind of collective."""
    measured = [record for record in records if record.outcome is Outcome.OK]
    lines = []
    for record, label in zip(measured, trial_labels(measured), strict=True):
        kinds = kinds_of(record)
        columns = {
            "kind": words(one.kind for one in kinds),
            "calls": numbers(one.calls for one in kinds),
            "bytes": numbers((one.message_bytes for one in kinds), format_gib),
            "ranks": numbers(one.group_size for one in kinds),
            "seconds": numbers((one.seconds for one in kinds), format_seconds),
            "bus bandwidth": numbers((one.bus_bandwidth for one in kinds), lambda rate: f"{rate / 1e9:.3g} GB/s"),
        }
        table = table_lines(titled(columns), console.width, 2) if kinds else []
        lines += [f"{label}: {_trial_text(record)}", *table, ""]
    ranks = [rank for record in measured for rank in record.ranks]
    failures = {rank.without_communication_failure for rank in ranks if rank.without_communication_failure}
    lines += [*LEGEND, *(f"steps without communication failed: {failure}" for failure in sorted(failures))]
    terminal.note_lines(console, lines)


def _trial_text(record: TrialRecord) -> str:
    fractions = record.exposed_fractions
    profiled, difference = (f" ({fraction:.0%})" for fraction in fractions) if fractions else ("", "")
    mark = " !" if disagrees(record) else ""
    return (
        f"step {_seconds(record.step_seconds)}, without communication {_seconds(record.seconds_without_communication)};"
        f" communication {_seconds(record.communication_seconds)}, exposed"
        f" {_seconds(record.exposed_communication_seconds)}{profiled} by the profiler,"
        f" {_seconds(record.exposed_by_difference_seconds)}{difference} by difference{mark}"
    )


def matrix_rate_line(rate: MatrixRate, profile: Profile) -> str:
    """Return the fastest trial's model FLOP/s beside the machine's rate of matrix products, in one sentence."""
    mfu = "" if rate.mfu is None else f", MFU {rate.mfu:.1%} of the datasheet's peak"
    return (
        f"{rate.dtype} matrix products reach {rate.matmul_flops_per_second / 1e12:.4g} TFLOP/s"
        f" (calibrated on {profile.machine}, {profile.measured_on}); the fastest trial {rate.trial} has"
        f" {rate.model_flops_per_second / 1e12:.4g} TFLOP/s of model FLOPs: {rate.fraction:.1%} of that{mfu}"
    )
