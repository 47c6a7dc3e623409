"""The page of results: of one sweep, or of several."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_bench.report.charts.description import Bars, Plot, Slide
from fsdp_bench.report.charts.frontier import frontier_slides
from fsdp_bench.report.charts.trade_off import TradeOffPoint, trade_off_plot
from fsdp_bench.report.charts.trial_bars import CHARTS, charts_of, measured_slide
from fsdp_bench.report.charts.trial_facts import conditions
from fsdp_bench.report.charts.trial_slides import group_by_chart
from fsdp_bench.report.html.blocks import Block, Details, Facts, Page, Section, Table, Text, table
from fsdp_bench.report.html.errors import error_section, step_sections
from fsdp_bench.report.measured import tables
from fsdp_bench.report.measured.frontier_text import frontier_columns, summary
from fsdp_bench.report.table import numbers, words
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.codec import from_file
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.frontier import FrontierRecord
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
        return tables.comparable([record for _, record in self.ran])


def sweep_page(folder: Path, profile: Profile | None) -> Page:
    """Return the page of results.

    Raises ResultsError if there are none or all are broken, SpecError for a newer record.
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
    sections = [
        replace(section, blocks=tuple(block for block in section.blocks if block not in lead))
        for section in _sections(only, profile)
    ]
    return Page(
        title=f"Sweep {only.name} on {only.machine}",
        source=source,
        answer=answer,
        reason=". ".join(rest),
        lead=lead,
        sections=tuple(section for section in sections if section.blocks),
        notes=tuple(notes),
    )


def _read(folder: Path) -> tuple[list[SweepFolder], list[str]]:
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
    return [
        Section(f"{name}: {section.title}", section.blocks, "" if place else name)
        for place, section in enumerate(sections)
    ]


def _answer(sweep: SweepFolder) -> list[str]:
    if sweep.frontier is not None:
        return [summary(sweep.frontier)]
    compared = sweep.compared
    if not compared:
        return [tables.nothing_fits([record for _, record in sweep.ran])]
    first, *rest = tables.findings(compared) or ["nothing was measured"]
    return [f"{tables.what_is_shared(compared)} ({compared[0].source}): {first}", *rest]


def _headline(sweep: SweepFolder) -> tuple[Block, ...]:
    if sweep.frontier is not None:
        return tuple(frontier_blocks(sweep.frontier)[:1])
    chart = _trade_off(sweep)
    if chart is not None:
        return (chart,)
    bars = _bar_sections(sweep.records, sweep.machine)
    return bars[0].blocks[:1] if bars else ()


def _trade_off(sweep: SweepFolder) -> Plot | None:
    """Return memory against speed of the comparable trials; None if fewer than two have both."""
    compared = sweep.compared
    points = [
        TradeOffPoint(tables.peak_of(record), tables.speed_of(record), True, number, _name(record))
        for number, record in sweep.ran
        if any(record is one for one in compared) and tables.peak_of(record) and tables.speed_of(record)
    ]
    if len(points) < 2:
        return None
    what = tables.what_is_shared(compared)
    caption = f"Memory against speed: {what} (measured); the numbers are those of the table of trials"
    return trade_off_plot(points, caption, "peak allocated per rank", "tokens/s per rank", {})


def _name(record: TrialRecord) -> str:
    setup, strategy = record.setup, tables.strategy_text(record)
    name = f"{strategy} {setup.api.value} {setup.precision} checkpointing {setup.checkpointing.value}"
    return f"{name}: {format_gib(tables.peak_of(record))}, {tables.speed_of(record):,.0f} tokens/s"


def _sections(sweep: SweepFolder, profile: Profile | None) -> list[Section]:
    ran = sweep.ran
    if not ran:
        return [_conditions(sweep)]
    found = []
    marked = [*tables.by_memory(sweep.compared)[:1], *tables.by_speed(sweep.compared)[-1:]]  # named by the answer
    if sweep.frontier is not None:
        found.append(Section("The largest that fits", tuple(frontier_blocks(sweep.frontier))))
        marked = []
    found.append(Section("Trials", (_trial_table(ran, marked), *_reasons(ran), *_notes(sweep))))
    found += [] if sweep.frontier is not None else _bar_sections(sweep.records, sweep.machine)
    found += step_sections(marked[-1], profile) if marked else []
    return [*found, error_section(ran, profile), _conditions(sweep)]


def _trial_table(numbered: Sequence[tuple[int, TrialRecord]], marked: Sequence[TrialRecord]) -> Table:
    records = [record for _, record in numbered]
    sources = " and ".join(dict.fromkeys(record.source for record in records))
    times = ", times are medians" if "measured" in sources else ""
    columns = {"#": numbers(number for number, _ in numbered)}
    columns |= {one.name: one for one in tables.trial_columns(records)}
    rows = [place for place, record in enumerate(records) if any(record is one for one in marked)]
    return table(f"{len(records)} trials ({sources}); memory of the worst rank{times}", columns, rows)


def _reasons(numbered: Sequence[tuple[int, TrialRecord]]) -> list[Block]:
    found = [
        (number, record, reason)
        for number, record in numbered
        for reason in filter(None, (record.reason, *(f"suspect: {suspicion}" for suspicion in record.suspect)))
    ]
    columns = {
        "#": numbers(number for number, _, _ in found),
        "outcome": words(tables.outcome_text(record) for _, record, _ in found),
        "reason": words(reason for _, _, reason in found),
    }
    title = "Why trials failed, or are suspect"
    return [Details(title, (table(title, columns),))] if found else []


def _bar_sections(records: list[TrialRecord], machine: str) -> list[Section]:
    grouped = [(trials, charts_of(trials)) for trials in group_by_chart(records, machine)]
    found = []
    for chart in CHARTS:
        bars = [
            bars for trials, charts in grouped if chart in charts for bars in _of_slide(measured_slide(chart, trials))
        ]
        if bars:
            folded = [Details(block.title, (block,)) for block in bars[1:]]
            found.append(Section(chart.title, (bars[0], *folded)))
    return found


def _of_slide(slide: Slide) -> list[Bars]:
    """Return the bars of a slide, with its conditions below them."""
    remarks = ("; ".join(slide.conditions), *slide.notes)
    title = f"{slide.title}; {slide.subtitle}"
    return [replace(bars, title=title, remarks=remarks) for bars in slide.charts if isinstance(bars, Bars)]


def _notes(sweep: SweepFolder) -> list[Block]:
    reasons = [record.reason or UNKNOWN for record in sweep.records if record.outcome is Outcome.SKIPPED]
    notes = [f"Skipped {reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons)]
    if any(tables.disagrees(record) for record in sweep.records):
        notes.append("* by the profiler; steps without communication save another part of the step, by over 10 points.")
    return list(map(Text, notes))


def _conditions(sweep: SweepFolder) -> Section:
    records = sweep.records
    machine = from_file(sweep.home / "machine.json", Machine)
    times = sorted(record.started_at for record in records)
    facts = [("sweep", sweep.name), *_machine_facts(machine)]
    facts += [("first trial", times[0]), ("last trial", times[-1])] if times else []
    shared = [line for line in conditions(records, sweep.machine) if not line.startswith("machine: ")]
    facts.append(("trials", "; ".join(shared)))
    flops = dict.fromkeys(record.peak_flops_source for record in records if record.peak_flops_source)
    facts += [("peak FLOP/s", source) for source in flops]
    models = dict.fromkeys(f"{record.model.name}: {record.model.describe()}" for record in records)
    return Section("Conditions and versions", (Facts((*facts, *(("model", text) for text in models))),))


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
    bars = [bars for _, slide in frontier_slides(record) for bars in _of_slide(slide)]
    return [*bars, table("Every search", frontier_columns(record)), *skipped] if searched else list(skipped)
