"""The scaling picture: predicted tokens a second of each GPU over the number of nodes, a line a setup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from fsdp_bench.plan.question import Prediction, Question, answer
from fsdp_bench.plan.speed import speed
from fsdp_bench.report.charts.axis import FONT, LINE
from fsdp_bench.report.charts.canvas import EDGE, HEIGHT, WIDTH, new_figure, text_width, wrap, write
from fsdp_bench.report.text.prediction import common_line, title, varying_fields
from fsdp_bench.report.text.speed import rests_on
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster
from fsdp_bench.spec.setup import TrainSetup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FURTHEST = 64
"""Nodes, where the user names no more."""
LEFT = 110.0
LINES = (
    ("#0072B2", "o", "-"), ("#E69F00", "s", "--"), ("#35AB85", "^", "-."), ("#D55E00", "D", ":"),
    ("#5B3A66", "v", "-"), ("#333333", "P", "--"), ("#CC79A7", "X", "-."), ("#8CCBF0", "*", ":"),
)  # fmt: skip
"""Colour, marker and dash; the last two tell lines apart in black and white."""


@dataclass(frozen=True)
class Curve:
    """One setup over numbers of nodes."""

    name: str
    nodes: tuple[int, ...]
    tokens: tuple[float | None, ...]
    """Of one GPU; None where the time is unknown."""
    fits: tuple[bool | None, ...]
    """Whether the memory of a node suffices; None where that is unknown."""

    @property
    def efficiency(self) -> float | None:
        """The last one's share of the first one's."""
        known = [value for value in self.tokens if value is not None]
        return known[-1] / known[0] if len(known) > 1 else None


def node_counts(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to ``most``, and that."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return tuple(counts) if counts[-1] == most else (*counts, most)


def curves(questions: Sequence[Question]) -> list[Curve]:
    """Predict every setup on growing numbers of nodes, up to those that the questions name.

    Raises:
        SpecError: where no server is named.
    """
    first = questions[0].hardware
    if not isinstance(first, Cluster):
        raise SpecError("scaling: no server is named; --server NAME, and --nodes N for how far")
    counts = node_counts(first.num_nodes if first.num_nodes > 1 else FURTHEST)
    varying = varying_fields(questions)
    found = []
    for question in questions:
        answers = [_answer(question, nodes) for nodes in counts]
        found.append(
            Curve(
                name=re.sub(r" \(\d+\)", "", title(question, varying)),
                nodes=counts,
                tokens=tuple(None if one is None else one.speed.tokens_per_second_per_gpu for one in answers),
                fits=tuple(None if one is None else one.fits for one in answers),
            )
        )
    return found


def _answer(question: Question, nodes: int) -> Prediction | None:
    """Predict a setup on so many nodes; None where it cannot run on them."""
    cluster = question.hardware
    assert isinstance(cluster, Cluster)
    cluster = msgspec.structs.replace(cluster, num_nodes=nodes)
    setup = _on(question.setup, cluster)
    return None if setup is None else answer(replace(question, setup=setup, hardware=cluster))


def _on(setup: TrainSetup, cluster: Cluster) -> TrainSetup | None:
    """Return a setup on so many nodes: hybrid strategies shard within one, and need two."""
    if not setup.strategy.is_hybrid:
        return msgspec.structs.replace(setup, world_size=cluster.world_size)
    if cluster.num_nodes == 1:
        return None
    return msgspec.structs.replace(setup, world_size=cluster.world_size, shard_size=cluster.gpus_per_node)


def scaling_figure(questions: Sequence[Question]) -> Figure:
    """Return the picture of the curves of setups of one model on one kind of server.

    Raises:
        SpecError: where no server is named, or no time is known.
    """
    if len(questions) > len(LINES):
        raise SpecError(f"scaling: {len(questions)} setups are too many for one picture; at most {len(LINES)}")
    found = curves(questions)
    if not any(value is not None for curve in found for value in curve.tokens):
        raise SpecError("scaling: no step's time is known here: nobody documents this server's links")
    return _figure(found, questions)


def _figure(found: Sequence[Curve], questions: Sequence[Question]) -> Figure:
    figure, first = new_figure(), questions[0]
    cluster = first.hardware
    assert isinstance(cluster, Cluster)
    rates = speed(first.model, first.setup, cluster, first.kernels, first.profile)
    footer = wrap(
        [
            f"nodes of {cluster.server.name}: {cluster.gpus_per_node} x {cluster.gpu.name}",
            common_line(first.setup, varying_fields(questions)).partition(", ")[2],
            "the same batch on every GPU, so that the whole batch grows with the nodes",
            _memory_words(found),
            "predicted for eager, rank 0",
            f"rates: {rests_on(rates, first.profile)}",
        ],
        WIDTH - 2 * EDGE,
    )
    for index, line in enumerate(footer):
        write(figure, (len(footer) - index) * LINE - 4, line, size=FONT, color="#444444")
    write(figure, HEIGHT - 34, "Predicted speed of each GPU over the number of nodes", size=18, weight="bold")
    write(figure, HEIGHT - 66, f"{first.model.name}: {first.model.describe()}", size=13)
    bottom, top = len(footer) * LINE + 78, HEIGHT - 120.0
    right = max(text_width(_label(curve), FONT, bold=True) for curve in found) + EDGE + 30
    box = (LEFT / WIDTH, bottom / HEIGHT, (WIDTH - LEFT - right) / WIDTH, (top - bottom) / HEIGHT)
    _draw(figure.add_axes(box), found)
    return figure


def _memory_words(found: Sequence[Curve]) -> str:
    """Return what the marks say of memory."""
    fits = {one for curve in found for one, value in zip(curve.fits, curve.tokens, strict=True) if value is not None}
    if fits == {None}:
        return "whether the memory suffices is unknown"
    return "hollow: predicted not to fit in memory" if False in fits else "all of it is predicted to fit in memory"


def _label(curve: Curve) -> str:
    """Return a curve's name, how much of the speed on the fewest nodes is kept on the most, and from when it fits."""
    known = [nodes for nodes, value in zip(curve.nodes, curve.tokens, strict=True) if value is not None]
    base = f" of {known[0]} nodes'" if known and known[0] > 1 else ""
    kept = [] if curve.efficiency is None else [f"{curve.efficiency:.0%}{base} kept"]
    fitting = [nodes for nodes, fits in zip(curve.nodes, curve.fits, strict=True) if fits]
    if False in curve.fits:
        kept.append(f"fits from {fitting[0]} nodes" if fitting else "does not fit")
    return ": ".join([curve.name, *([", ".join(kept)] if kept else [])])


def _draw(axes: Axes, found: Sequence[Curve]) -> None:
    places: list[float] = []
    highest = max(value for curve in found for value in curve.tokens if value is not None)
    for index, curve in enumerate(found):
        color, marker, dash = LINES[index % len(LINES)]
        known = zip(curve.nodes, curve.tokens, curve.fits, strict=True)
        points = [(nodes, value, fits) for nodes, value, fits in known if value is not None]
        line = [nodes for nodes, _, _ in points], [value for _, value, _ in points]
        axes.plot(*line, color=color, linestyle=dash, linewidth=2)
        for nodes, value, fits in points:
            face = "white" if fits is False else color
            axes.plot(nodes, value, color=color, marker=marker, markersize=9, markerfacecolor=face, markeredgewidth=1.8)
    ends = [(curve, next((v for v in reversed(curve.tokens) if v is not None), None)) for curve in found]
    for curve, end in sorted(((c, e) for c, e in ends if e is not None), key=lambda pair: -pair[1]):
        color = LINES[list(found).index(curve) % len(LINES)][0]
        y = min([end / highest / 1.1, *(place - 0.042 for place in places)])
        places.append(y)
        axes.annotate(_label(curve), (1.015, y), xycoords="axes fraction", fontsize=FONT, color=color,
                      va="center", weight="bold")  # fmt: skip
    counts = found[0].nodes
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(0, highest * 1.1)
    axes.set_xlabel("nodes", fontsize=12, labelpad=8)
    axes.set_ylabel("predicted tokens/s per GPU", fontsize=12)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(labelsize=12, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
