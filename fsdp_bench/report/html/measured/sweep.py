"""The page of results: of one sweep, or of several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.chart_data.drawn import drawn_memory, drawn_streams
from fsdp_bench.plan.chart_data.memory_timeline import rank_timeline
from fsdp_bench.plan.chart_data.step_streams import StepStreams
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import speed
from fsdp_bench.report.charts.trials.trial_facts import conditions
from fsdp_bench.report.html.blocks import Block, Facts, Page, Plot, Section, Text
from fsdp_bench.report.html.measured.errors import error_section
from fsdp_bench.report.html.measured.frontier import frontier_blocks
from fsdp_bench.report.html.measured.trials import bar_sections, trade_off, trial_table
from fsdp_bench.report.html.step import lanes_of, memory_plot, phase_bars
from fsdp_bench.report.measured.conclusion import comparable, findings, nothing_fits, what_is_shared
from fsdp_bench.report.measured.frontier_text import summary
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.prediction import setup_line
from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import ResultsError, SpecError
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.results.load import machine_description, read_frontier_of, read_records, sweep_folders
from fsdp_bench.validate.memory import kernels_of
from fsdp_bench.validate.step_time import compare_time


@dataclass(frozen=True)
class SweepFolder:
    """What one sweep left."""

    home: Path
    records: list[TrialRecord]
    frontier: FrontierRecord | None

    @property
    def name(self) -> str:
        """The sweep's name: that of its folder."""
        return self.home.absolute().name

    @property
    def machine(self) -> str:
        """One line that describes the machine."""
        return machine_description(self.home)

    @property
    def ran(self) -> list[tuple[int, TrialRecord]]:
        """The trials that ran, numbered."""
        ran = [record for record in self.records if record.outcome is not Outcome.SKIPPED]
        return list(enumerate(ran, start=1))

    @property
    def compared(self) -> list[TrialRecord]:
        """The trials that the answer is about."""
        return comparable([record for _, record in self.ran])


def sweep_page(folder: Path, profile: Profile | None) -> Page:
    """Return the page of the results in a folder.

    Raises:
        ResultsError: if there are none, or all are broken.
        SpecError: if a newer fsdp-bench wrote one.
    """
    found, notes = _read(folder)
    source = " and ".join(dict.fromkeys(record.source for one in found for record in one.records))
    if len(found) > 1:
        answers = [f"{one.home.absolute().parent.name}/{one.name}: {'. '.join(_answer(one))}" for one in found]
        return Page(
            title=f"Results in {folder.absolute().name}",
            source=source,
            answer=f"{len(found)} sweeps",
            lead=tuple(Text(answer) for answer in answers),
            sections=tuple(_named(one.name, section) for one in found for section in _sections(one, profile)),
            notes=tuple(notes),
        )
    (only,) = found
    answer, *rest = _answer(only)
    return Page(
        title=f"Sweep {only.name} on {only.machine}",
        source=source,
        answer=answer,
        reason=". ".join(rest),
        lead=_headline(only),
        sections=tuple(_sections(only, profile)),
        notes=tuple(notes),
    )


def _read(folder: Path) -> tuple[list[SweepFolder], list[str]]:
    """Read every sweep below a folder; also return what is broken."""
    found, notes = [], list[str]()
    for home in sweep_folders(folder):
        try:
            found.append(SweepFolder(home, read_records(home, notes), read_frontier_of(home)))
        except ResultsError as error:
            notes.append(str(error))
    if not found:
        raise ResultsError(notes[0])
    return found, notes


def _named(name: str, section: Section) -> Section:
    return Section(f"{name}: {section.title}", section.blocks)


def _answer(sweep: SweepFolder) -> list[str]:
    """Return the answer, and what is to be said beside it."""
    if sweep.frontier is not None:
        return [summary(sweep.frontier)]
    compared = sweep.compared
    if not compared:
        return [nothing_fits([record for _, record in sweep.ran])]
    first, *rest = findings(compared) or ["nothing was measured"]
    return [f"{what_is_shared(compared)}: {first}", *rest]


def _headline(sweep: SweepFolder) -> tuple[Block, ...]:
    if sweep.frontier is not None:
        return tuple(frontier_blocks(sweep.frontier)[:1])
    chart = _trade_off(sweep)
    return () if chart is None else (chart,)


def _trade_off(sweep: SweepFolder) -> Plot | None:
    compared = sweep.compared
    if len(compared) < 2:
        return None
    own = [(number, record) for number, record in sweep.ran if any(record is one for one in compared)]
    caption = (
        f"Memory against speed: {what_is_shared(compared)} (measured); the numbers are those of the table of trials"
    )
    return trade_off(own, caption)


def _sections(sweep: SweepFolder, profile: Profile | None) -> list[Section]:
    ran = sweep.ran
    if not ran:
        return [_conditions(sweep)]
    found = []
    if sweep.frontier is not None:
        found.append(Section("The largest that fits", tuple(frontier_blocks(sweep.frontier)[1:])))
    marked = _named_by_the_answer(sweep)
    found.append(Section("Trials", (trial_table(ran, marked), *_skipped(sweep))))
    found += [] if sweep.frontier is not None else bar_sections(sweep.records, sweep.machine)
    found += _step_sections(marked[-1:], profile)
    return [*found, error_section(ran, profile), _conditions(sweep)]


def _skipped(sweep: SweepFolder) -> list[Block]:
    reasons = [record.reason or UNKNOWN for record in sweep.records if record.outcome is Outcome.SKIPPED]
    return [Text(f"Skipped {reasons.count(reason)}: {reason}") for reason in dict.fromkeys(reasons)]


def _named_by_the_answer(sweep: SweepFolder) -> list[TrialRecord]:
    """Return the trial with the least memory and the fastest, of those that are compared."""
    if sweep.frontier is not None:
        return []

    def peak(record: TrialRecord) -> int:
        memory = record.worst_rank_memory
        return (memory.peak_allocated_bytes if memory else None) or 0

    known = sorted((one for one in sweep.compared if peak(one)), key=lambda one: (peak(one), one.step_seconds or 0.0))
    timed = [one for one in sweep.compared if one.tokens_per_second_per_gpu]
    return [*known[:1], *([max(timed, key=lambda one: one.tokens_per_second_per_gpu or 0.0)] if timed else [])]


def _step_sections(chosen: list[TrialRecord], profile: Profile | None) -> list[Section]:
    """Return one predicted step of a trial: memory over it beside what was measured, and what runs when."""
    if not chosen:
        return []
    (trial,) = chosen
    which = "the fastest trial" if trial.tokens_per_second_per_gpu else "the trial with the least memory"
    title = f"Memory over one step of {which}"
    if isinstance(trial.model, ModelCode):
        why = "Its code would have to be recorded first, which a report does not do; fsdp-bench predict draws it."
        return [Section(title, (Text(why),))]
    try:
        blocks = _memory_blocks(trial)
    except SpecError as error:
        blocks = [Text(f"Not predicted: {error}")]
    return [Section(title, (Text(f"{trial.model.name}: {setup_line(trial.setup)}"), *blocks)), _streams(trial, profile)]


def _memory_blocks(trial: TrialRecord) -> list[Block]:
    timeline = rank_timeline(trial.model, trial.setup, kernels_of(trial), 0)  # type: ignore[arg-type]
    memory = trial.ranks[0].memory if trial.ranks else None
    gpu = gpu_by_product_name(trial.ranks[0].device_name) if trial.ranks else None
    usable = trial.run.gpu_limit_bytes or (gpu.usable_memory_bytes if gpu else None)
    drawn = drawn_memory(timeline)
    peaks = {phase.name: phase.peak.total for phase in timeline.phases}
    highest = {name: max(phase.peak.total for phase in timeline.phases if phase.name == name) for name in peaks}
    return [
        memory_plot(drawn, "Memory of rank 0 over one training step (predicted)", usable),
        phase_bars(
            highest,
            f"Peak of each phase of rank 0, predicted and {trial.source}",
            None if memory is None else memory.phases,
        ),
    ]


def _streams(trial: TrialRecord, profile: Profile | None) -> Section:
    title, compared = "What runs when", compare_time(trial, profile)
    if compared.predicted_seconds is None:
        return Section(title, (Text(f"Unknown: {compared.reason}."),))
    kernels = "cpu" if trial.hardware == "cpu" else "cuda"
    gpu = gpu_by_product_name(trial.ranks[0].device_name) if kernels == "cuda" else None
    asked = Question(trial.model, trial.setup, gpu, kernels, profile=profile)  # type: ignore[arg-type]
    alone = trial.device == "emulated"
    found = speed(asked.model, asked.setup, gpu, kernels, profile, with_spans=True, without_communication=alone)
    drawn = drawn_streams(StepStreams(asked, found))
    if drawn is None:
        return Section(title, (Text("Unknown."),))
    measured = Facts((("step, predicted", f"{drawn.step_seconds * 1e3:,.1f} ms"),
                      ("step, measured", f"{(trial.step_seconds or 0) * 1e3:,.1f} ms")))  # fmt: skip
    return Section(title, (*lanes_of(drawn, trial.setup.gradient_accumulation_steps), measured))


def _conditions(sweep: SweepFolder) -> Section:
    records, machine = sweep.records, _machine(sweep.home)
    times = sorted(record.started_at for record in records)
    facts = [("sweep", sweep.name), *_machine_facts(machine)]
    facts += [("first trial", times[0]), ("last trial", times[-1])] if times else []
    shared = [line for line in conditions(records, sweep.machine) if not line.startswith("machine: ")]
    facts.append(("trials", "; ".join(shared)))
    flops = dict.fromkeys(record.peak_flops_source for record in records if record.peak_flops_source)
    facts += [("peak FLOP/s", source) for source in flops]
    models = dict.fromkeys(f"{record.model.name}: {record.model.describe()}" for record in records)
    return Section("Conditions and versions", (Facts((*facts, *(("model", text) for text in models))),))


def _machine(home: Path) -> Machine | None:
    try:
        return from_json((home / "machine.json").read_bytes(), Machine)
    except (OSError, msgspec.DecodeError):
        return None


def _machine_facts(machine: Machine | None) -> list[tuple[str, str]]:
    if machine is None:
        return [("machine", UNKNOWN)]
    gpus = ", ".join(f"{gpu.name} ({format_gib(gpu.memory_bytes)})" for gpu in machine.gpus)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        ("machine", machine.describe()),
        ("processor", f"{machine.cpu_name}, {machine.num_cores} cores, {format_gib(machine.memory_bytes)}"),
        *([("GPUs", gpus)] if gpus else []),
        *([("driver", machine.driver_version)] if machine.driver_version else []),
        ("platform", machine.platform),
        ("versions", versions),
    ]
