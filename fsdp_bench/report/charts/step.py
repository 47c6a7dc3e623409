"""The picture of a predicted step: what runs when on which stream, and which communication nothing hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import Speed, speed
from fsdp_bench.replay.schedule import Span, Spans, union
from fsdp_bench.report.charts.axis import FONT, LINE
from fsdp_bench.report.charts.canvas import EDGE, FAILURE, HEIGHT, WIDTH, new_figure, text_width, wrap, write
from fsdp_bench.report.text.prediction import common_line, setup_line, title, varying_fields
from fsdp_bench.report.text.speed import rests_on, share
from fsdp_bench.report.text.words import hardware_words
from fsdp_bench.simulate.events import Stream
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 4
"""Setups that one picture shows legibly."""

LEFT, RIGHT, BETWEEN = 130.0, 30.0, 92.0
"""Pixels beside the panels, and from one to the next."""

STYLES = {
    "forward": ("#8CCBF0", ""),
    "loss": ("#D55E00", ""),
    "backward": ("#0072B2", ""),
    "optimizer": ("#E69F00", "///"),
    "all_gather": ("#35AB85", "\\\\\\"),
    "reduce_scatter": ("#5B3A66", "..."),
    "all_reduce": ("#CC79A7", "xx"),
    "beside": ("#8C8C8C", ""),
    "copy": ("#F0E442", "--"),
}
"""Colour and hatch by the phase of operators and the kind of a collective; hatches tell them apart without colour.
Operators on a stream of collectives stand beside these, whatever the phase."""
WORDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "beside": "casts, divisions",
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
class Panel:
    """A stretch of one setup's step."""

    title: str
    found: Speed
    begin: float
    end: float


def step_figure(questions: Sequence[Question]) -> Figure:
    """Return the picture of the whole step of one setup and three blocks of it, or of several's steps on one scale.

    Raises:
        SpecError: for more setups than a picture shows, and where no step's time is known.
    """
    return _figure(_panels(questions), questions)


def _panels(questions: Sequence[Question]) -> list[Panel]:
    if len(questions) > MOST:
        raise SpecError(f"step-chart: {len(questions)} setups are too many for one picture; at most {MOST}")
    found = [speed(q.model, q.setup, q.hardware, q.kernels, q.profile, with_spans=True) for q in questions]
    unknown = next((one for one in found if one.time.step_seconds is None), None)
    if unknown is not None:
        raise SpecError(f"step-chart: the step's time is unknown: {', '.join(unknown.time.unknown)}")
    longest = max(one.time.step_seconds or 0.0 for one in found)
    varying = varying_fields(questions)
    if len(found) > 1:
        return [Panel(title(q, varying), one, 0.0, longest) for q, one in zip(questions, found, strict=True)]
    begin, end = _middle_of_backward(found[0])
    return [
        Panel("the whole step", found[0], 0.0, longest),
        Panel("blocks in the middle of backward", found[0], begin, end),
    ]


def _middle_of_backward(found: Speed) -> tuple[float, float]:
    """Return when about three blocks in the middle of backward run."""
    spans = [span for span in found.time.spans if span.phase == "backward" and span.kind == "compute"]
    begin, end = spans[0].begin, max(span.end for span in spans)
    middle, each = (begin + end) / 2, (end - begin) / found.model.num_hidden_layers
    return max(middle - 1.5 * each, begin), min(middle + 1.5 * each, end)


def _figure(panels: Sequence[Panel], questions: Sequence[Question]) -> Figure:
    figure = new_figure()
    footer = _footer(questions, panels)
    for index, line in enumerate(footer):
        write(figure, (len(footer) - index) * LINE - 4, line, size=FONT, color="#444444")
    write(
        figure,
        HEIGHT - 34,
        "Predicted step: what runs when, and which communication nothing hides",
        size=18,
        weight="bold",
    )
    write(figure, HEIGHT - 66, _subtitle(panels), size=13)
    _legend(figure, panels, HEIGHT - 98)
    top, bottom = HEIGHT - 150.0, len(footer) * LINE + 56
    height = (top - bottom - (len(panels) - 1) * BETWEEN) / len(panels)
    for index, panel in enumerate(panels):
        y = top - (index + 1) * height - index * BETWEEN
        axes = figure.add_axes((LEFT / WIDTH, y / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, height / HEIGHT))
        _draw(axes, panel)
    return figure


def _subtitle(panels: Sequence[Panel]) -> str:
    found = panels[0].found
    if len({id(panel.found) for panel in panels}) > 1:
        return f"{found.model.name}: {found.model.describe()}"
    time = found.time
    assert time.step_seconds is not None
    assert time.exposed_communication_seconds is not None
    return (
        f"{found.model.name}: {format_seconds(time.step_seconds)} a step,"
        f" {format_seconds(time.exposed_communication_seconds)} of it exposed communication,"
        f" {found.tokens_per_second_per_gpu or 0:,.0f} tokens/s per GPU, MFU {share(found.mfu)}"
    )


def _footer(questions: Sequence[Question], panels: Sequence[Panel]) -> list[str]:
    first, varying = questions[0], varying_fields(questions)
    setup = setup_line(first.setup) if len(questions) == 1 else common_line(first.setup, varying)
    return wrap(
        [
            hardware_words(first.hardware, first.setup.world_size),
            setup,
            "predicted for eager, rank 0",
            f"rates: {rests_on(panels[0].found, first.profile)}",
            "grey: casts, copies and divisions of what is sent, beside the other operators",
            "red: a collective runs and no operator does",
        ],
        WIDTH - 2 * EDGE,
    )


def _legend(figure: Figure, panels: Sequence[Panel], y: float) -> None:
    from matplotlib.patches import Rectangle

    used = {_style_of(span) for panel in panels for span in panel.found.time.spans if span.kind != "host"}
    x = EDGE
    for name in [name for name in STYLES if name in used] + [EXPOSED]:
        color, hatch = STYLES.get(name, (FAILURE, ""))
        patch = Rectangle((x / WIDTH, (y - 8) / HEIGHT), 26 / WIDTH, 16 / HEIGHT, facecolor=color, hatch=hatch,
                          edgecolor="white", linewidth=0.0, transform=figure.transFigure)  # fmt: skip
        figure.add_artist(patch)
        text = WORDS.get(name, name)
        figure.text((x + 33) / WIDTH, y / HEIGHT, text, fontsize=FONT + 1, va="center")
        x += 33 + text_width(text, FONT + 1) + 26


def _style_of(span: Span) -> str:
    if span.kind == "collective":
        return span.work.name
    if span.kind == "copy":
        return "copy"
    return span.phase if span.stream is Stream.COMPUTE else "beside"


def _draw(axes: Axes, panel: Panel) -> None:
    spans = [span for span in panel.found.time.spans if span.end > panel.begin and span.begin < panel.end]
    rows = [stream for stream in ROWS if any(span.stream is stream for span in panel.found.time.spans)]
    scale = 1e3
    for place, stream in enumerate(reversed(rows)):
        on_stream = [span for span in spans if span.stream is stream and span.kind != "host"]
        for name in STYLES:
            bars = _bars([span for span in on_stream if _style_of(span) == name], panel)
            if bars:
                color, hatch = STYLES[name]
                axes.broken_barh([(begin * scale, (end - begin) * scale) for begin, end in bars], (place - 0.36, 0.72),
                                 facecolor=color, hatch=hatch, edgecolor="white", linewidth=0.0)  # fmt: skip
    waits = [(max(begin, panel.begin), min(end, panel.end)) for begin, end in _exposed(panel.found.time.spans)]
    shown = [(begin * scale, (end - begin) * scale) for begin, end in waits if end > begin]
    axes.broken_barh(shown, (len(rows) - 0.42, 0.3), facecolor=FAILURE, linewidth=0.0)
    axes.set_ylim(-0.6, len(rows) + 0.1)
    axes.set_xlim(panel.begin * scale, panel.end * scale)
    axes.set_yticks([*range(len(rows)), len(rows) - 0.27], [*(ROWS[stream] for stream in reversed(rows)), EXPOSED])
    axes.tick_params(axis="both", labelsize=12, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{panel.title}, milliseconds", fontsize=12.5, loc="left", pad=8)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _bars(spans: Sequence[Span], panel: Panel) -> Spans:
    """Return what is drawn of spans: merged where they touch, or are nearer than a pixel."""
    pixel = (panel.end - panel.begin) / (WIDTH - LEFT - RIGHT)
    merged: Spans = []
    for begin, end in union([(span.begin, span.end) for span in spans]):
        begin, end = max(begin, panel.begin), min(end, panel.end)
        if merged and begin - merged[-1][1] < pixel / 2:
            merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def _exposed(spans: Sequence[Span]) -> Spans:
    """Return when a collective runs and no operator does."""
    compute = union([(span.begin, span.end) for span in spans if span.kind == "compute"])
    found: Spans = []
    for begin, end in union([(span.begin, span.end) for span in spans if span.kind == "collective"]):
        for start, stop in compute:
            if stop <= begin or start >= end:
                continue
            if start > begin:
                found.append((begin, start))
            begin = max(begin, stop)
        if end > begin:
            found.append((begin, end))
    return found
