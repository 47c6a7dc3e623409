"""Predicted tokens per second per GPU over the number of nodes, one line for each setup."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.ranges import Range
from fsdp_bench.plan.setup_text import setup_line, title, varying
from fsdp_bench.plan.speed import Speed
from fsdp_bench.report.charts.axis import Axis, Tick
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Area, Key, Line, Plot, Point, Slide, check_number
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import TrainSetup

MOST_NODES = 64
"""The most nodes of the chart if the user names no number."""


@dataclass(frozen=True)
class ScalingCurve:
    """One setup on growing numbers of nodes."""

    question: Question
    nodes: tuple[int, ...]
    speeds: tuple[Speed | None, ...]
    """Speed on each number of nodes. None if the setup cannot run on that number."""
    fits: tuple[bool | None, ...]
    """Whether the setup fits on each number of nodes. None if that is unknown."""

    @property
    def tokens(self) -> tuple[float | None, ...]:
        """Tokens per second of one GPU. None if the step time is unknown."""
        return tuple(None if one is None else one.tokens_per_second_per_gpu for one in self.speeds)

    @property
    def efficiency(self) -> float | None:
        """Speed of a GPU on the most nodes over its speed on the fewest."""
        known = [value for value in self.tokens if value is not None]
        return known[-1] / known[0] if len(known) > 1 else None


def node_counts(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and ``most``."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return tuple(counts) if counts[-1] == most else (*counts, most)


def scaling_curves(questions: Sequence[Question]) -> list[ScalingCurve]:
    """Predict setups on 1, 2, 4, ... nodes, up to the first question's. Raises SpecError without a server."""
    first = questions[0].hardware
    if first is None or not first.has_server:
        raise SpecError("scaling: no server is named; --server NAME, and --nodes N for how far")
    counts = node_counts(first.num_nodes if first.num_nodes > 1 else MOST_NODES)
    found = []
    for question in questions:
        answers = [_answer(question, nodes) for nodes in counts]
        speeds = tuple(None if one is None else one.speed for one in answers)
        found.append(
            ScalingCurve(question, counts, speeds, tuple(None if one is None else one.fits for one in answers))
        )
    return found


def _answer(question: Question, nodes: int) -> Prediction | None:
    """Predict a setup on ``nodes`` nodes. None if it cannot run on them."""
    assert question.hardware is not None
    hardware = msgspec.structs.replace(question.hardware, num_nodes=nodes)
    setup = on_nodes(question.setup, hardware)
    return None if setup is None else answer(replace(question, setup=setup, hardware=hardware))


def on_nodes(setup: TrainSetup, cluster: Hardware) -> TrainSetup | None:
    """Return a setup with the world size of ``cluster``. Hybrid strategies shard within a node; None on one node."""
    if not setup.strategy.is_hybrid:
        return msgspec.structs.replace(setup, world_size=cluster.world_size)
    if cluster.num_nodes == 1:
        return None
    return msgspec.structs.replace(setup, world_size=cluster.world_size, shard_size=cluster.gpus_per_node)


_DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (6, 2, 1, 2), (1, 1.5))
STYLES = tuple(
    Style(color, is_line=True, dash=_DASHES[place % 4], width=2.0, sign=sign)
    for place, (color, sign) in enumerate(
        (("blue", "o"), ("orange", "s"), ("green", "^"), ("red", "D"), ("plum", "v"), ("ink", "P"), ("pink", "X"),
         ("sky", "*"))
    )
)  # fmt: skip
"""Signs and dashes distinguish the lines in black and white."""


def scaling_slide(questions: Sequence[Question]) -> Slide:
    """Return the chart of setups on servers. Raises SpecError for too many, without a server, or without times."""
    check_number("scaling", len(questions), len(STYLES))
    found = scaling_curves(questions)
    if not any(value is not None for curve in found for value in curve.tokens):
        raise SpecError("scaling: no step's time is known here: nobody documents this server's links")
    first, differing = questions[0], varying([one.values for one in questions])
    hardware = first.hardware
    assert hardware is not None
    nodes = found[0].nodes
    fits = {one for curve in found for one, value in zip(curve.fits, curve.tokens, strict=True) if value is not None}
    memory = "all of it is predicted to fit in memory"
    if False in fits:
        memory = "white marks: predicted not to fit in memory"
    elif fits == {None}:
        memory = "whether the memory suffices is unknown"
    conditions = (
        setup_line(first.values, ("world_size", *differing)),
        "the same batch on every GPU, so that the whole batch grows with the nodes",
        memory,
        "predicted for eager, rank 0",
        *(f"bands: {reason}" for reason in _reasons(span for curve in found for _, _, span in _ranged(curve))),
        *dict.fromkeys(f"rates: {rests_on(speed, first.profile)}" for speed in filter(None, found[0].speeds[-1:])),
    )
    return Slide(
        f"Speed of each GPU over the number of nodes (predicted): {nodes[0]} to {nodes[-1]} x {hardware.name}"
        f" ({hardware.gpus_per_node} x {hardware.gpu.name} each)",
        f"{first.model.name}: {first.model.describe()}",
        conditions,
        (_plot(found, differing),),
        is_legend_beside=True,
    )


def _reasons(spans: Iterable[Range]) -> list[str]:
    """Return why ranges are as wide as they are; of clauses that differ in their numbers alone, the last."""
    clauses = [clause for span in spans for clause in span.because.split("; ")]
    found = {re.sub(r"[\d.]+", "", clause): clause for clause in clauses}
    return ["; ".join(found.values())] if found else []


def _plot(found: Sequence[ScalingCurve], differing: Sequence[str]) -> Plot:
    areas, lines, points, ends = list[Area](), list[Line](), list[Point](), list[tuple[float, Key]]()
    for curve, style in zip(found, STYLES, strict=False):
        known = [
            (float(nodes), value, fits)
            for nodes, value, fits in zip(curve.nodes, curve.tokens, curve.fits, strict=True)
            if value is not None
        ]
        lines.append(Line(style, tuple(nodes for nodes, _, _ in known), tuple(value for _, value, _ in known)))
        points += [Point(style, nodes, value, is_hollow=fits is False) for nodes, value, fits in known]
        bands = _ranged(curve)
        low = tuple(value * span.slowest for _, value, span in bands)
        high = tuple(value * span.fastest for _, value, span in bands)
        areas.append(Area(Style(style.color, opacity=0.12), tuple(nodes for nodes, _, _ in bands), low, high))
        ends.append((known[-1][1] if known else 0.0, Key(style, _label(curve, differing))))
    counts = found[0].nodes
    names = tuple(Tick(count, str(count)) for count in counts)
    highest = max(value for line in (*(line.y for line in lines), *(area.high for area in areas)) for value in line)
    return Plot(
        "",
        Axis("nodes", counts[0] / 1.25, counts[-1] * 1.25, is_log=True, names=names, has_grid=False),
        Axis("predicted tokens/s per GPU", 0.0, highest * 1.1),
        tuple(areas),
        tuple(lines),
        tuple(points),
        tuple(key for _, key in sorted(ends, key=lambda pair: -pair[0])),
    )


def _label(curve: ScalingCurve, differing: Sequence[str]) -> str:
    known = [nodes for nodes, value in zip(curve.nodes, curve.tokens, strict=True) if value is not None]
    lines = [re.sub(r" \(\d+\)", "", title(curve.question.values, differing)).replace(", ", ",\n")]
    if curve.efficiency is not None:
        nodes = "1 node" if known[0] == 1 else f"{known[0]} nodes"
        lines.append(f"{curve.efficiency:.0%} of the speed on {nodes}")
    fitting = [nodes for nodes, fits in zip(curve.nodes, curve.fits, strict=True) if fits]
    if False in curve.fits:
        lines.append(f"fits from {fitting[0]} nodes" if fitting else "does not fit")
    return "\n".join(lines)


def _ranged(curve: ScalingCurve) -> list[tuple[float, float, Range]]:
    """Return the numbers of nodes on which the speed has a range, each with both."""
    known = zip(curve.nodes, curve.tokens, curve.speeds, strict=True)
    return [(float(nodes), value, one.range) for nodes, value, one in known if value is not None and one and one.range]
