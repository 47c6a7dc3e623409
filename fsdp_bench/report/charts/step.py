"""A predicted step: what it consists of, and what runs when on each stream."""

from collections.abc import Sequence

from fsdp_bench.plan.chart_data import DrawnStreams, DrawnView, drawn_streams, step_speeds
from fsdp_bench.plan.document import hardware_document
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.setup_text import title, varying
from fsdp_bench.plan.speed import Speed
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.report.charts.axis import Axis
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Key, Lane, Lanes, Slide, Spans, check_number
from fsdp_bench.report.text.conditions import conditions, hardware_text, sentences
from fsdp_bench.report.text.speed import PART_LABELS, percent, rests_on, throughput_text
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.units import format_seconds

MOST = 4
"""Most setups in one picture that remain legible."""

STYLES = {
    "forward": Style("sky"),
    "loss": Style("red"),
    "backward": Style("blue"),
    "optimizer": Style("orange", "///"),
    "all_gather": Style("green", "\\\\\\"),
    "reduce_scatter": Style("plum", "..."),
    "all_reduce": Style("pink", "xx"),
    "cast": Style("grey"),
    "copy": Style("yellow", "--"),
    "host": Style("light-orange", "++"),
}
"""Styles by phase or kind of collective; operators on a stream of collectives are ``cast``."""
EXPOSED = Style("failure")
_ROLE_NAMES = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "cast": "casts, divisions",
    "host": "hooks and operators of the host",
}
_STREAM_NAMES = {
    "compute": "operators",
    "all_gather_copy_in": "copy-in",
    "all_gather": "all-gather",
    "reduce_scatter": "reductions",
    "all_reduce": "all-reduce",
    "optimizer_offload": "optimizer copies",
}
PART_STYLES = {  # greys for operators; the others as among the streams
    StepPart.MATRIX_PRODUCTS: Style("dark-grey"),
    StepPart.ATTENTION: Style("middle-grey"),
    StepPart.OTHER_OPERATORS: Style("light-grey"),
    StepPart.OPTIMIZER: Style("orange"),
    StepPart.EXPOSED_COMMUNICATION: EXPOSED,
    StepPart.EXPOSED_COPIES: Style("yellow"),
    StepPart.CPU_OPTIMIZER: Style("light-orange"),
    StepPart.WAITING_FOR_RANKS: Style("pale-sky"),
    StepPart.WAITING_FOR_HOST: Style("shade"),
}


def stream_lanes(view: DrawnView, heading: str, remarks: tuple[str, ...] = (), end: float | None = None) -> Lanes:
    """Return what streams do in an interval, up to ``end`` seconds, and exposed communication."""
    streams = dict.fromkeys([*_STREAM_NAMES, *(row.stream for row in view.rows)])
    lanes = [Lane("exposed", (Spans(EXPOSED, _milliseconds(view.exposed)),))]
    for stream in streams:
        rows = sorted((row for row in view.rows if row.stream == stream), key=lambda row: _place(row.role))
        spans = tuple(Spans(_style(row.role), _milliseconds(row.spans)) for row in rows)
        lanes += [Lane(_STREAM_NAMES.get(stream, stream), spans)] if spans else []
    roles = sorted({row.role for row in view.rows}, key=_place)
    legend = [Key(_style(role), _ROLE_NAMES.get(role, role)) for role in roles]
    exposed = Key(EXPOSED, "exposed: a collective runs and no operator does")
    axis = Axis("milliseconds", view.begin * 1e3, (end or view.end) * 1e3)
    return Lanes(heading, axis, tuple(lanes), (*legend, exposed), remarks)


def _milliseconds(intervals: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((begin * 1e3, end * 1e3) for begin, end in intervals)


def _place(role: str) -> int:
    return [*STYLES].index(role) if role in STYLES else len(STYLES)


def _style(role: str) -> Style:
    return STYLES.get(role, STYLES["cast"])


def both_views(streams: DrawnStreams, num_drawn: int, num_micro_batches: int) -> tuple[Lanes, Lanes]:
    """Return the step as far as it is drawn, and a part of it enlarged."""
    exposed = streams.exposed_communication_seconds
    remarks = (
        f"{format_seconds(streams.step_seconds)} for what is drawn:"
        f" operators {format_seconds(streams.compute_seconds)},"
        f" collectives {format_seconds(streams.communication_seconds)}, of which {format_seconds(exposed)} exposed",
    )
    what = "The whole step"
    if num_drawn < num_micro_batches:
        what = f"{num_drawn} of the step's {num_micro_batches} micro-batches, and the optimizer"
    part = "Blocks in the middle of backward" if num_drawn == 1 else "A part of it, enlarged"
    whole = stream_lanes(streams.whole, f"{what}, rank 0 (predicted)", remarks)
    return whole, stream_lanes(streams.middle_of_backward, f"{part} (predicted)")


def step_slide(questions: Sequence[Question]) -> Slide:
    """Return one setup's step and three blocks, or several on one scale.

    Raises SpecError for more than one picture shows legibly, or without a time.
    """
    check_number("step-chart", len(questions), MOST)
    found, first, differing = step_speeds(questions), questions[0], varying([one.values for one in questions])
    names = [title(question.values, differing) if len(questions) > 1 else "" for question in questions]
    drawn = [
        streams
        for one, question in zip(found, questions, strict=True)
        if (streams := drawn_streams(one.time, question.model.num_hidden_layers)) is not None
    ]
    charts = [stream_lanes(one.whole, name or "the whole step", end=_longest(found))
              for one, name in zip(drawn, names, strict=True)]  # fmt: skip
    if len(questions) == 1:
        charts.append(stream_lanes(drawn[0].middle_of_backward, "blocks in the middle of backward"))
    return Slide(
        f"One training step (predicted): {hardware_text(hardware_document(first.hardware), first.setup.world_size)}",
        _subtitle(first.model, found),
        (
            *sentences(conditions([one.document() for one in questions], differing)),
            "predicted for eager, rank 0",
            f"rates: {rests_on(found[0], first.profile)}",
            "casts: also copies and divisions of what is sent, beside the other operators",
        ),
        (_parts(found, names), *charts),
    )


def _longest(found: Sequence[Speed]) -> float:
    return max(one.time.step_seconds or 0.0 for one in found)


def _parts(found: Sequence[Speed], names: Sequence[str]) -> Lanes:
    lanes = []
    for one, name in zip(found, names, strict=True):
        begin, spans = 0.0, []
        for key, label in PART_LABELS.items():
            part = StepPart(key)
            seconds = one.time.parts.get(part, 0.0)
            if seconds > 0:
                text = f"{label} {seconds / (one.time.step_seconds or 1.0):.0%}"
                spans.append(Spans(PART_STYLES[part], ((begin, begin + seconds),), text))
                begin += seconds
        lanes.append(Lane(name, tuple(spans)))
    return Lanes("what the step consists of", Axis("", 0.0, _longest(found), names=()), tuple(lanes))


def _subtitle(model: Model, found: Sequence[Speed]) -> str:
    first = found[0]
    if len(found) > 1:
        return f"{model.name}: {model.describe()}"
    time = first.time
    assert time.step_seconds is not None
    assert time.exposed_communication_seconds is not None
    return (
        f"{model.name}: {format_seconds(time.step_seconds)} a step,"
        f" {format_seconds(time.exposed_communication_seconds)} of it exposed communication,"
        f" {throughput_text(first)}, MFU {percent(first.mfu)}"
    )
