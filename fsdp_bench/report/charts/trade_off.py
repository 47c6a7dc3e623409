"""Memory against speed: one point for each setup or trial, and the Pareto frontier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.setup_text import title, varying
from fsdp_bench.report.charts.axis import Axis, around, memory_unit
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Key, Line, Plot, Point, Slide, check_number
from fsdp_bench.report.text.conditions import conditions, hardware_text, sentences
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import format_gib

MOST = 30
"""Most setups in one picture that remain legible."""
MOST_NUMBERED = 40
"""Most points that are numbered; more are dots."""
FAR = 1.3
"""A setup above this many times the GPU's memory, or the most that fits, is at the right end."""
BEST, FITS, UNFIT = Style("navy"), Style("steel"), Style("brick")
FRONTIER = Style("blue", is_line=True, width=2.2)
USABLE = Style("failure", is_line=True, dash=(4, 2), width=1.2)


@dataclass(frozen=True)
class TradeOffPoint:
    """One setup or trial: the GPU memory that it needs and how fast it is."""

    memory_bytes: float
    """The peak reserved memory without allocation retries, of a prediction; live bytes for CPU kernels."""
    tokens: float
    """Tokens per second of one GPU."""
    fits: bool | None
    number: int = 0
    """Its number in the list of setups, from 1."""
    name: str = ""


def pareto_frontier(points: Sequence[TradeOffPoint]) -> list[TradeOffPoint]:
    """Return the points that fit and that no other point beats, in order of increasing memory."""
    best: list[TradeOffPoint] = []
    usable = [point for point in points if point.fits is not False]
    for point in sorted(usable, key=lambda point: (point.memory_bytes, -point.tokens)):
        if not best or point.tokens > best[-1].tokens:
            best.append(point)
    return best


def trade_off_plot(
    points: Sequence[TradeOffPoint], heading: str, memory: str, speed: str, usable: Mapping[int, str]
) -> Plot:
    """Return the plot of at least two points, with a line at the usable bytes of each GPU."""
    best = pareto_frontier(points)
    unit, unit_name = memory_unit(max(point.memory_bytes for point in points))
    x = Axis(f"{memory}, {unit_name}", 0.0, right_end(points, list(usable)) / unit)
    y = around(speed, [point.tokens for point in points])
    styles = [UNFIT if point.fits is False else BEST if point in best else FITS for point in points]
    is_numbered = len(points) <= MOST_NUMBERED
    marks = tuple(
        Point(
            style,
            point.memory_bytes / unit,
            point.tokens,
            point.number if is_numbered else None,
            f"{point.name}, does not fit" if point.fits is False else point.name,
        )
        for point, style in zip(points, styles, strict=True)
    )
    frontier = Line(FRONTIER, tuple(p.memory_bytes / unit for p in best), tuple(p.tokens for p in best), is_step=True)
    limits = [Line(USABLE, (size / unit,) * 2, (y.low, y.high)) for size in usable]
    words = {BEST: "no other one is faster with less memory", FITS: "others that fit", UNFIT: "does not fit"}
    legend = [Key(style, text) for style, text in words.items() if style in styles]
    if usable:
        texts = [f"{format_gib(size)} on {name}" for size, name in sorted(usable.items())]
        legend.append(Key(USABLE, f"usable: {'; '.join(texts)}"))
    return Plot(heading, x, y, lines=(frontier, *limits), points=marks, legend=tuple(legend))


def right_end(points: Sequence[TradeOffPoint], usable: Sequence[int]) -> float:
    """Return the bytes at the right end of the axis: it shows the GPUs and all that fit, others if they are near."""
    least = min(point.memory_bytes for point in points)
    fitting = [point.memory_bytes for point in points if point.fits is not False]
    near = FAR * max([*usable, *(fitting or [least])])
    return 1.06 * max([*usable, *(point.memory_bytes for point in points if point.memory_bytes <= near)], default=least)


def trade_off_slide(predictions: Sequence[Prediction]) -> Slide:
    """Return the trade-off of setups. Raises SpecError for too many, or if fewer than two times are known."""
    check_number("trade-off", len(predictions), MOST)
    answers = [one.document(with_time=False, with_communication=False) for one in predictions]
    first = predictions[0]
    question, differing = first.question, varying([one.values for one in predictions])
    points = trade_off_points(predictions)
    if len(points) < 2:
        known = f"the time of {len(points)} of {len(predictions)} setups is known, two are needed"
        raise SpecError(f"trade-off: {known}; --strategy all, or predict one to see what is missing")
    kind = "reserved" if question.kernels == "cuda" else "live tensors"
    gpu = first.gpu
    usable = {first.gpu_bytes: gpu.name} if gpu and first.gpu_bytes else {}
    plot = trade_off_plot(points, "", f"predicted memory of one GPU ({kind})", "predicted tokens/s per GPU", usable)
    return Slide(
        f"Memory against speed (predicted): {hardware_text(answers[0].server, question.setup.world_size)}",
        f"{question.model.name}: {question.model.describe()}",
        (
            *sentences(conditions(answers, differing)),
            "predicted for eager",
            f"rates: {rests_on(first.speed, question.profile)}",
        ),
        (plot,),
    )


def trade_off_points(predictions: Sequence[Prediction]) -> list[TradeOffPoint]:
    """Return a point for each setup whose step time is known, the fastest first."""
    differing, found = varying([one.values for one in predictions]), []
    for one in predictions:
        tokens = one.speed.tokens_per_second_per_gpu
        needed = one.needed_bytes if one.question.kernels == "cuda" else one.memory.peak_allocated_bytes
        if tokens is not None:
            found.append((needed, tokens, one.fits, title(one.values, differing)))
    found.sort(key=lambda each: (-each[1], each[0]))
    return [TradeOffPoint(needed, tokens, fits, number, name)
            for number, (needed, tokens, fits, name) in enumerate(found, start=1)]  # fmt: skip
