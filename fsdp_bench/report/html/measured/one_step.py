"""One predicted step of a trial: memory over it beside what was measured, and what runs when."""

from __future__ import annotations

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.chart_data.drawn import drawn_memory, drawn_streams
from fsdp_bench.plan.chart_data.memory_timeline import rank_timeline
from fsdp_bench.plan.chart_data.step_streams import StepStreams
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import speed
from fsdp_bench.report.charts.memory_timeline import memory_plot, phase_bars
from fsdp_bench.report.charts.step import both_views
from fsdp_bench.report.html.blocks import Block, Facts, Section, Text
from fsdp_bench.report.html.measured.errors import why_not_simulated
from fsdp_bench.report.text.setups import setup_line
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.validate.memory import kernels_of
from fsdp_bench.validate.step_time import compare_time


def step_sections(trial: TrialRecord, profile: Profile | None) -> list[Section]:
    """Return one predicted step of a trial: memory over it beside what was measured, and what runs when."""
    which = "the fastest trial" if trial.tokens_per_second_per_gpu else "the trial with the least memory"
    title = f"Memory over one step of {which}"
    if (why := why_not_simulated(trial)) is not None:
        return [Section(title, (Text(f"Not predicted: {why}."),))]
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
        memory_plot(drawn, "Memory of rank 0 over one training step (predicted)", usable=usable),
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
    hardware = Hardware.of_gpu(gpu) if gpu else None
    asked = Question(trial.model, trial.setup, hardware, kernels, profile=profile)  # type: ignore[arg-type]
    alone = trial.device == "emulated"
    found = speed(asked.model, asked.setup, hardware, kernels, profile, with_spans=True, without_communication=alone)
    drawn = drawn_streams(StepStreams(asked, found))
    if drawn is None:
        return Section(title, (Text("Unknown."),))
    steps = trial.setup.gradient_accumulation_steps
    measured = Facts((("step, predicted", f"{drawn.step_seconds * 1e3:,.1f} ms"),
                      ("step, measured", f"{(trial.step_seconds or 0) * 1e3:,.1f} ms")))  # fmt: skip
    return Section(title, (*both_views(drawn, steps, steps), measured))
