"""The chart of a predicted step: the operators and collectives on each stream, and the exposed communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_bench.plan.chart_data.step_streams import StepStreams, merged, role_of, step_streams
from fsdp_bench.plan.question import Question
from fsdp_bench.replay.intervals import Intervals, union
from fsdp_bench.report.charts.figure import FAILURE, SMALL, TEXT, WIDTH, legend, new_frame
from fsdp_bench.report.charts.step_parts import PARTS_HEIGHT, draw_parts
from fsdp_bench.report.text.common import hardware_text
from fsdp_bench.report.text.setups import common_line, setup_line, title, varying_fields
from fsdp_bench.report.text.speed import percent, rests_on, throughput_text
from fsdp_bench.simulate.events import Stream
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 4
"""Most setups in one chart that remain legible."""

STYLES = {
    "forward": ("#8CCBF0", ""),
    "loss": ("#D55E00", ""),
    "backward": ("#0072B2", ""),
    "optimizer": ("#E69F00", "///"),
    "all_gather": ("#35AB85", "\\\\\\"),
    "reduce_scatter": ("#5B3A66", "..."),
    "all_reduce": ("#CC79A7", "xx"),
    "cast": ("#8C8C8C", ""),
    "copy": ("#F0E442", "--"),
}
"""Colour and hatch by the phase of an operator or the kind of a collective.

Hatches distinguish them without colour. Operators of any phase on a stream of collectives have the style ``cast``.
"""
LEGEND_LABELS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "cast": "casts, divisions",
}
ROWS = {
    Stream.COMPUTE: "operators",
    Stream.ALL_GATHER_COPY_IN: "copy-in",
    Stream.ALL_GATHER: "all-gather",
    Stream.REDUCE_SCATTER: "reductions",
    Stream.ALL_REDUCE: "all-reduce",
}
EXPOSED = "exposed"


@dataclass(frozen=True)
class StepPanel:
    """One panel: an interval of one setup's step."""

    title: str
    streams: StepStreams
    begin: float
    end: float


def step_figure(questions: Sequence[Question]) -> Figure:
    """Return the chart of one setup's whole step and of three of its blocks, or of several setups' steps on one scale.

    Raises:
        SpecError: for more setups than one chart shows legibly, or if no step's time is known.
    """
    if len(questions) > MOST:
        raise SpecError(f"step-chart: {len(questions)} setups are too many for one picture; at most {MOST}")
    found, first = step_streams(questions), questions[0]
    panels = _panels(found)
    several = len(questions) > 1
    setup = common_line(first.setup, varying_fields(questions)) if several else setup_line(first.setup)
    frame = new_frame(
        f"One training step (predicted): {hardware_text(first.hardware, first.setup.world_size)}",
        _subtitle(panels),
        [
            f"{first.model.describe()}",
            setup,
            "predicted for eager, rank 0",
            f"rates: {rests_on(panels[0].streams.speed, first.profile)}",
            "grey: casts, copies and divisions of what is sent, beside the other operators",
            "red: a collective runs and no operator does",
        ],
    )
    rows = frame.body.subplots(1 + len(panels), 1, height_ratios=[PARTS_HEIGHT * len(panels)] + len(panels) * [1.0])
    draw_parts(rows[0], [(panel.title if several else "", panel.streams.speed.time) for panel in panels[: len(found)]])
    for axes, panel in zip(rows[1:], panels, strict=True):
        _draw(axes, panel, TEXT if len(panels) < 3 else SMALL - 1)
    legend(frame, _handles(panels))
    return frame.figure


def _panels(found: Sequence[StepStreams]) -> list[StepPanel]:
    longest = max(one.speed.time.step_seconds or 0.0 for one in found)
    varying = varying_fields([one.question for one in found])
    if len(found) > 1:
        return [StepPanel(title(one.question, varying), one, 0.0, longest) for one in found]
    return [
        StepPanel("the whole step", found[0], 0.0, longest),
        StepPanel("blocks in the middle of backward", found[0], *found[0].middle_of_backward),
    ]


def _subtitle(panels: Sequence[StepPanel]) -> str:
    found = panels[0].streams.speed
    if len({id(panel.streams) for panel in panels}) > 1:
        return f"{found.model.name}: {found.model.describe()}"
    time = found.time
    assert time.step_seconds is not None
    assert time.exposed_communication_seconds is not None
    return (
        f"{found.model.name}: {format_seconds(time.step_seconds)} a step,"
        f" {format_seconds(time.exposed_communication_seconds)} of it exposed communication,"
        f" {throughput_text(found)}, MFU {percent(found.mfu)}"
    )


def _handles(panels: Sequence[StepPanel]) -> list[Artist]:
    from matplotlib.patches import Patch

    used = {role_of(span) for panel in panels for span in panel.streams.spans if span.kind != "host"}
    styles = {name: style for name, style in STYLES.items() if name in used} | {EXPOSED: (FAILURE, "")}
    return [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.0, label=LEGEND_LABELS.get(name, name))
        for name, (color, hatch) in styles.items()
    ]


def _draw(axes: Axes, panel: StepPanel, font: float) -> None:
    """Draw one row per stream and a row for exposed communication on top; the axis is in milliseconds."""
    ran = panel.streams.spans
    spans = [span for span in ran if span.end > panel.begin and span.begin < panel.end and span.kind != "host"]
    rows = [stream for stream in ROWS if any(span.stream is stream for span in ran)]
    for place, stream in enumerate(reversed(rows)):
        for name, (color, hatch) in STYLES.items():
            own = [(span.begin, span.end) for span in spans if span.stream is stream and role_of(span) == name]
            axes.broken_barh(_bars(union(own), panel), (place - 0.36, 0.72), facecolor=color, hatch=hatch,
                             edgecolor="white", linewidth=0.0)  # fmt: skip
    axes.broken_barh(_bars(panel.streams.exposed, panel), (len(rows) - 0.42, 0.3), facecolor=FAILURE, linewidth=0.0)
    axes.set_ylim(-0.6, len(rows) + 0.1)
    axes.set_xlim(panel.begin * 1e3, panel.end * 1e3)
    axes.set_yticks([*range(len(rows)), len(rows) - 0.27], [*(ROWS[stream] for stream in reversed(rows)), EXPOSED])
    axes.tick_params(axis="both", labelsize=font, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{panel.title}, milliseconds", fontsize=12, loc="left")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _bars(spans: Intervals, panel: StepPanel) -> list[tuple[float, float]]:
    """Return begin and length of spans in milliseconds; merge spans that are less than half a pixel apart."""
    found = merged(spans, panel.begin, panel.end, (panel.end - panel.begin) / WIDTH)
    return [(begin * 1e3, (end - begin) * 1e3) for begin, end in found]
