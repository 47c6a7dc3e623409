"""Tokens per second of one GPU over the number of nodes, for each setup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import Speed
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
    """Predict every setup on 1, 2, 4, ... nodes, up to the number that the first question names.

    Raises:
        SpecError: if no server is named.
    """
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
