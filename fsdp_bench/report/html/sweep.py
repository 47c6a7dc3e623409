"""The page of results: of one sweep, or of several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from fsdp_bench.report.charts.description import Plot
from fsdp_bench.report.charts.frontier import frontier_slides
from fsdp_bench.report.charts.trial_facts import conditions
from fsdp_bench.report.html.blocks import Block, Cell, Facts, Page, Row, Section, Text, table
from fsdp_bench.report.html.errors import error_section, step_sections
from fsdp_bench.report.html.trials import bar_sections, reasons, trade_off, trial_table
from fsdp_bench.report.measured.conclusion import comparable, findings, nothing_fits, what_is_shared
from fsdp_bench.report.measured.frontier_text import summary
from fsdp_bench.report.measured.tables import disagrees
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord, LargestValues
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.results.load import machine_description, read_frontier_of, read_records, sweep_folders


@dataclass(frozen=True)
class SweepFolder:
    """The results of one sweep."""

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
            sections=tuple(section for one in found for section in _named(one.name, _sections(one, profile))),
            notes=tuple(notes),
        )
    (only,) = found
    answer, *rest = _answer(only)
    lead = _headline(only)
    return Page(
        title=f"Sweep {only.name} on {only.machine}",
        source=source,
        answer=answer,
        reason=". ".join(rest),
        lead=lead,
        sections=_without(_sections(only, profile), lead),
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


def _named(name: str, sections: list[Section]) -> list[Section]:
    """Return sections with the sweep's name in their titles, of which the first one is listed."""
    links = [name, *[""] * (len(sections) - 1)]
    return [
        Section(f"{name}: {section.title}", section.blocks, link) for section, link in zip(sections, links, strict=True)
    ]


def _answer(sweep: SweepFolder) -> list[str]:
    """Return the answer, and what is to be said beside it."""
    if sweep.frontier is not None:
        return [summary(sweep.frontier)]
    compared = sweep.compared
    if not compared:
        return [nothing_fits([record for _, record in sweep.ran])]
    first, *rest = findings(compared) or ["nothing was measured"]
    return [f"{what_is_shared(compared)} ({compared[0].source}): {first}", *rest]


def _headline(sweep: SweepFolder) -> tuple[Block, ...]:
    if sweep.frontier is not None:
        return tuple(frontier_blocks(sweep.frontier)[:1])
    chart = _trade_off(sweep)
    if chart is not None:
        return (chart,)
    bars = bar_sections(sweep.records, sweep.machine)
    return bars[0].blocks[:1] if bars else ()


def _without(sections: list[Section], blocks: tuple[Block, ...]) -> tuple[Section, ...]:
    """Return sections without blocks that stand with the answer already."""
    kept = [
        Section(section.title, tuple(block for block in section.blocks if block not in blocks)) for section in sections
    ]
    return tuple(section for section in kept if section.blocks)


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
        found.append(Section("The largest that fits", tuple(frontier_blocks(sweep.frontier))))
    marked = _named_by_the_answer(sweep)
    found.append(Section("Trials", (trial_table(ran, marked), *reasons(ran), *_notes(sweep))))
    found += [] if sweep.frontier is not None else bar_sections(sweep.records, sweep.machine)
    found += step_sections(marked[-1], profile) if marked else []
    return [*found, error_section(ran, profile), _conditions(sweep)]


def _notes(sweep: SweepFolder) -> list[Block]:
    reasons = [record.reason or UNKNOWN for record in sweep.records if record.outcome is Outcome.SKIPPED]
    notes = [f"Skipped {reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons)]
    if any(disagrees(record) for record in sweep.records):
        notes.append("* by the profiler; steps without communication save another part of the step, by over 10 points.")
    return list(map(Text, notes))


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


def frontier_blocks(record: FrontierRecord) -> list[Block]:
    """Return the largest values as bars and as a table, and why cells are skipped."""
    searched = [cell for cell in record.cells if cell.status != "skipped"]
    reasons = Counter(cell.reason for cell in record.cells if cell.status == "skipped")
    skipped = [Text(f"Skipped {count}: {reason}") for reason, count in reasons.items()]
    bars = [
        replace(bars, title=slide.title, remarks=(f"{slide.subtitle}; {'; '.join(slide.conditions)}", *slide.notes))
        for _, slide in frontier_slides(record)
        for bars in slide.charts
    ]
    return [*bars, _table(record, searched), *skipped] if searched else list(skipped)


def _value(cell: FrontierCell, largest: LargestValues | None) -> str:
    return UNKNOWN if largest is None else cell.quantity.print(largest.fits)


def _table(record: FrontierRecord, cells: list[FrontierCell]) -> Block:
    titles = (
        "cell",
        "strategy",
        "api",
        "world size",
        "predicted",
        record.source,
        "steps apart",
        "trials",
        "runs out in",
    )
    rows = []
    for cell in cells:
        measured, predicted = cell.measured, cell.predicted
        failure = measured.limited_by if measured else None
        limit = (cell.reason or "") if measured is None else "nothing: no larger one was tried"
        cells_of_row = (
            Cell(cell.label),
            Cell(cell.setup.strategy.value),
            Cell(cell.setup.api.value),
            Cell(str(cell.setup.world_size), cell.setup.world_size),
            Cell(_value(cell, predicted), None if predicted is None else predicted.fits),
            Cell(_value(cell, measured), None if measured is None else measured.fits),
            Cell(UNKNOWN if cell.steps_apart is None else f"{cell.steps_apart:+d}", cell.steps_apart),
            Cell(str(len(cell.trials)), len(cell.trials)),
            Cell(limit if failure is None else f"{failure.phase} ({failure.place})"),
        )
        rows.append(Row(cells_of_row))
    return table("Every search", titles, rows, titles[3:8])
