"""Predictions of trials beside what was measured or rehearsed: memory, and time where rates are known."""

from collections import Counter
from collections.abc import Callable, Sequence

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.chart_data import drawn_memory, drawn_streams
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.setup_text import setup_line
from fsdp_bench.plan.speed import speed
from fsdp_bench.report.charts.axis import from_zero, memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Key, Line, Plot, Point
from fsdp_bench.report.charts.memory_timeline import memory_plot, phase_bars
from fsdp_bench.report.charts.step import both_views
from fsdp_bench.report.html.blocks import Block, Details, Facts, Section, Text, table
from fsdp_bench.report.table import Column, numbers, words
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.report.text.speed import step_text
from fsdp_bench.report.validation import error_columns, time_facts
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_gib
from fsdp_bench.validate.memory import MemoryComparison, compare_with_record, kernels_of, summarize
from fsdp_bench.validate.step_time import compare_time, summarize_time

NOT_HERE = "its code would have to be recorded first: fsdp-bench validate --against RESULTS"
MOST_BLOCKS = 4096
"""Most blocks, of all micro-batches of a step, that are simulated: the numbers of a record may be anything."""
Numbered = Sequence[tuple[int, TrialRecord]]


def error_section(numbered: Numbered, profile: Profile | None) -> Section:
    """Return predictions beside measurements."""
    source = numbered[0][1].source
    blocks = [*_memory(numbered, source), *(_time(numbered, profile) if source == "measured" else [])]
    return Section(f"Predicted against {source}", tuple(blocks))


def why_not_simulated(record: TrialRecord) -> str | None:
    """Return why a report does not simulate a trial; None if it does. Nothing that a record names is ever run."""
    if isinstance(record.model, ModelCode):
        return NOT_HERE
    size = record.model.num_hidden_layers * record.setup.gradient_accumulation_steps
    return None if size <= MOST_BLOCKS else f"{size} blocks of all micro-batches are too many to simulate in a report"


def _memory(numbered: Numbered, source: str) -> list[Block]:
    compared = []
    for number, record in numbered:
        reason = why_not_simulated(record)
        one = compare_with_record(record) if reason is None else MemoryComparison(label=record.id, error=reason)
        compared.append((number, one))
    known = [one for one in compared if one[1].phases]
    blocks: list[Block] = []
    if known:
        found = summarize([one for _, one in compared], source)
        blocks.append(table(f"Predicted and {source} bytes", {one.name: one for one in error_columns(found)}))
        if found.num_fits:
            blocks.append(
                Text(f"Whether a trial fits was predicted right in {found.num_fits_right} of {found.num_fits}.")
            )
        pairs = [(number, one.peak.predicted_bytes, one.peak.reference_bytes) for number, one in known]
        units = memory_unit(max(max(pair[1:]) for pair in pairs))
        worst = [one.worst for _, one in known]
        columns = {
            **_columns(pairs, [one.label for _, one in known], source, format_gib),
            "error": numbers((one.peak.relative for _, one in known), "{:+.2%}".format),
            "phase with the largest error": words(phase if error else "none" for phase, error in worst),
            "error there": numbers((error for _, error in worst), "{:+.2%}".format),
        }
        blocks += [
            against(f"Peak allocated: predicted against {source}", pairs, source, units, format_gib),
            Details(
                "Every trial's peak, predicted and " + source,
                (table(f"Peak allocated of rank 0, predicted and {source}", columns),),
            ),
        ]
    reasons = Counter(one.error or "it ran out of memory" for _, one in compared if not one.phases)
    return blocks + [Text(f"Memory is not compared of {count}: {reason}.") for reason, count in reasons.items()]


def _columns(
    pairs: Sequence[tuple[int, float, float]], labels: Sequence[str], source: str, text: Callable[[float], str]
) -> dict[str, Column]:
    return {
        "#": numbers(number for number, _, _ in pairs),
        "trial": words(label.partition(" ")[2] for label in labels),
        "predicted": numbers((predicted for _, predicted, _ in pairs), text),
        source: numbers((other for _, _, other in pairs), text),
    }


def _time(numbered: Numbered, profile: Profile | None) -> list[Block]:
    fit_in = [(number, record) for number, record in numbered if why_not_simulated(record) is None]
    compared = [(number, compare_time(record, profile)) for number, record in fit_in]
    known = [one for one in compared if one[1].error is not None]
    blocks: list[Block] = []
    if known:
        found = summarize_time([one for _, one in compared])
        pairs = [(number, one.predicted_seconds or 0.0, one.measured_seconds or 0.0) for number, one in known]
        columns = {
            **_columns(pairs, [one.label for _, one in known], "measured", step_text),
            "error": numbers((one.error for _, one in known), "{:+.1%}".format),
        }
        blocks += [
            Facts(tuple(time_facts(found))),
            against("Step time: predicted against measured", pairs, "measured", (1e-3, "ms"), step_text),
            Details("Every trial's step time", (table("Step time, predicted and measured", columns),)),
        ]
    reasons = Counter(one.reason or UNKNOWN for _, one in compared if one.error is None)
    return blocks + [Text(f"Time is not compared of {count}: {reason}.") for reason, count in reasons.items()]


TRIAL, EQUAL = Style("blue"), Style("faint", is_line=True)


def against(
    heading: str,
    pairs: Sequence[tuple[int, float, float]],
    source: str,
    units: tuple[float, str],
    text: Callable[[float], str],
) -> Plot:
    """Return predicted and measured values of trials, by number, on one scale; on the line they are equal."""
    unit, name = units
    values = [value / unit for pair in pairs for value in pair[1:]]
    x, y = (from_zero(f"{what}, {name}", values) for what in ("predicted", source))
    points = [
        Point(TRIAL, one / unit, other / unit, title=f"{number}: {text(one)}, {source} {text(other)}")
        for number, one, other in pairs
    ]
    return Plot(
        heading,
        x,
        y,
        lines=(Line(EQUAL, (0.0, x.high), (0.0, y.high)),),
        points=tuple(points),
        legend=(Key(TRIAL, "a trial"), Key(EQUAL, "equal")),
        is_square=True,
    )


def step_sections(trial: TrialRecord, profile: Profile | None) -> list[Section]:
    """Return one predicted step of a trial: memory over it beside what was measured, and what runs when."""
    which = "the fastest trial" if trial.tokens_per_second_per_gpu else "the trial with the least memory"
    title = f"Memory over one step of {which}"
    if (why := why_not_simulated(trial)) is not None:
        return [Section(title, (Text(f"Not predicted: {why}."),))]
    gpu = gpu_by_product_name(trial.ranks[0].device_name) if trial.ranks else None
    try:
        blocks = _memory_blocks(trial, gpu)
    except SpecError as error:
        blocks = [Text(f"Not predicted: {error}")]
    streams = Section("What runs when", tuple(_stream_blocks(trial, gpu, profile)))
    return [Section(title, (Text(f"{trial.model.name}: {setup_line(trial.setup)}"), *blocks)), streams]


def _memory_blocks(trial: TrialRecord, gpu: Gpu | None) -> list[Block]:
    steps = SimulatedSteps(trial.model, trial.setup, kernels_of(trial))  # type: ignore[arg-type]
    drawn = drawn_memory(steps, rank=0)
    memory = trial.ranks[0].memory if trial.ranks else None
    usable = trial.run.gpu_limit_bytes or (gpu.usable_memory_bytes if gpu else None)
    highest: dict[str, int] = {}
    for phase in drawn.phases:
        highest[phase.name] = max(phase.peak_bytes, highest.get(phase.name, 0))
    return [
        memory_plot(drawn, "Memory of rank 0 over one training step (predicted)", usable=usable),
        phase_bars(
            highest,
            f"Peak of each phase of rank 0, predicted and {trial.source}",
            None if memory is None else memory.phases,
        ),
    ]


def _stream_blocks(trial: TrialRecord, gpu: Gpu | None, profile: Profile | None) -> list[Block]:
    compared = compare_time(trial, profile)
    if compared.predicted_seconds is None:
        return [Text(f"Unknown: {compared.reason}.")]
    kernels = "cpu" if trial.hardware == "cpu" else "cuda"
    hardware = Hardware.of_gpu(gpu) if gpu and kernels == "cuda" else None
    asked = Question(trial.model, trial.setup, hardware, kernels, profile=profile)  # type: ignore[arg-type]
    alone = trial.device == "emulated"
    found = speed(asked.simulated, hardware, profile, with_spans=True, without_communication=alone)
    drawn = drawn_streams(found.time, asked.model.num_hidden_layers)
    if drawn is None:
        return [Text("Unknown.")]
    steps = trial.setup.gradient_accumulation_steps
    measured = Facts((("step, predicted", step_text(drawn.step_seconds)),
                      ("step, measured", step_text(trial.step_seconds or 0.0))))  # fmt: skip
    return [*both_views(drawn, steps, steps), measured]
