"""What would make a setup fit: switches that address what fills the card, each confirmed by predicting it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fsdp_bench.predict.estimate import MemoryPrediction, predict_memory
from fsdp_bench.predict.host import Build
from fsdp_bench.report.prediction import Prediction, Question, answer
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.setup import (
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    ShardingStrategy,
    TrainSetup,
)

MOST = 2
"""Remedies that are proposed."""
LONGEST = 5
"""Changes that are tried together."""
SHARE = 0.1
"""Part of the peak that a category needs for its switches to be tried."""
GAIN = 0.03
"""Part of the peak that a switch must save."""

_ADDRESSED = {
    "logits": ("loss", "batch"),
    "activations": ("checkpointing", "batch"),
    "parameters": ("strategy", "more_gpus", "offload"),
    "optimizer_state": ("strategy", "more_gpus", "offload"),
    "gradients": ("strategy", "more_gpus", "offload"),
    "unsharded_parameters": ("strategy",),
    "reduction_buffers": ("offload", "more_gpus"),
    "temporary": ("optimizer", "strategy", "more_gpus"),
}
"""Which switches address a category of the breakdown."""

_SWITCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "loss": ("--loss", "chunked", {"loss": Loss.CHUNKED}),
    "checkpointing": ("--checkpointing", "full", {"checkpointing": Checkpointing.FULL}),
    "offload": ("--offload", "params", {"offload": Offload.PARAMS}),
    "optimizer": ("--optimizer", "adamw-fused", {"optimizer": OptimizerKind.ADAMW_FUSED}),
    "strategy": ("--strategy", "FULL_SHARD", {"strategy": ShardingStrategy.FULL_SHARD, "shard_size": None}),
}


@dataclass(frozen=True)
class Change:
    """Some options with their values, and the question with them."""

    options: dict[str, str]
    question: Question


@dataclass(frozen=True)
class Remedy:
    """A change that was predicted."""

    switch: str
    """As on the command line."""
    prediction: Prediction


def remedies(prediction: Prediction) -> list[Remedy]:
    """Return at most MOST changes that fit, by what dominates; where none does alone, several together; else the best.

    Empty for what fits, and where nothing helps.
    """
    question, memory = prediction.question, prediction.estimate.memory
    if prediction.fits is not False:
        return []
    fitting = [remedy for change in _settings(prediction) if (remedy := _tried(change)).prediction.fits]
    helpful = _helpful(question, memory)
    tried = [_tried(change) for change in _likely(helpful)]
    fitting += [remedy for remedy in tried if remedy.prediction.fits]
    if fitting:
        return fitting[:MOST]
    less = [remedy for remedy in tried if _needed(remedy) < prediction.needed_bytes]
    return _together(question, memory) or sorted(less, key=_needed)[:MOST]


def with_twice_the_gpus(prediction: Prediction) -> Remedy | None:
    """Return the same setup on twice the GPUs, whether or not that helps; None where it cannot run."""
    question = prediction.question
    world = 2 * question.setup.world_size
    option, count, hardware = _larger(question.hardware, world)
    changed = _replaced(question, {"world_size": world}, hardware)
    return _tried(Change({option: str(count)}, changed)) if changed else None


def _settings(prediction: Prediction) -> Iterator[Change]:
    """Yield the changes that leave the training as it is: how memory is handed out, and who builds the model."""
    question, estimate = prediction.question, prediction.estimate
    if question.build is not Build.META:
        yield Change({"--load": "meta"}, replace(question, build=Build.META))
    under = estimate.memory.peak_allocated_bytes < (estimate.room_bytes or 0)
    full = estimate.allocator.out_of_memory is not None or estimate.allocator.num_alloc_retries > 0
    if under and full and not question.expandable_segments:
        yield Change({"--expandable-segments": ""}, replace(question, expandable_segments=True))


def _helpful(question: Question, memory: MemoryPrediction) -> list[tuple[MemoryPrediction, Change]]:
    """Return the changes with less peak allocated, those first that address the largest category."""
    breakdown, peak = memory.breakdown_bytes, memory.peak_allocated_bytes
    large = [name for name, size in sorted(breakdown.items(), key=lambda item: -item[1]) if size >= SHARE * peak]
    names = dict.fromkeys(name for category in large for name in _ADDRESSED[category])
    changes = [change for name in names if (change := _changed(question, name))]
    found = [(_memory(change.question), change) for change in changes]
    return [pair for pair in found if pair[0].peak_allocated_bytes <= (1 - GAIN) * peak]


def _likely(helpful: list[tuple[MemoryPrediction, Change]]) -> list[Change]:
    """Return the changes whose allocator is worth a replay: the first whose peak is under the card's memory."""
    card = _card_bytes(helpful[0][1].question) if helpful else 0
    under = [change for memory, change in helpful if memory.peak_allocated_bytes < card]
    best = [change for _, change in sorted(helpful, key=lambda pair: pair[0].peak_allocated_bytes)]
    return (under or best)[: MOST + 1]


def _together(question: Question, memory: MemoryPrediction) -> list[Remedy]:
    """Return several changes that fit together, each addressing what dominates after those before it; or nothing."""
    options: dict[str, str] = {}
    for _ in range(LONGEST):
        helpful = _helpful(question, memory)
        if not helpful:
            return []
        memory, change = helpful[0]
        question, options = change.question, {**options, **change.options}
        if memory.peak_allocated_bytes < _card_bytes(question):
            found = _tried(Change(options, question))
            if found.prediction.fits:
                return [found]
    return []


def _tried(change: Change) -> Remedy:
    words = (f"{option} {value}".rstrip() for option, value in change.options.items())
    return Remedy(" ".join(words), answer(change.question))


def _changed(question: Question, name: str) -> Change | None:
    """Return the question under another switch; None where that changes nothing or cannot run."""
    if name == "more_gpus":
        return _more_gpus(question)
    if name == "batch":
        half = question.setup.micro_batch_size // 2
        changed = _replaced(question, {"micro_batch_size": half}) if half else None
        return Change({"--batch": str(half)}, changed) if changed else None
    if name == "optimizer" and question.setup.optimizer is not OptimizerKind.ADAMW_FOREACH:
        return None
    if name == "strategy" and question.setup.world_size == 1:
        return None
    option, value, fields = _SWITCHES[name]
    if name == "strategy" and question.setup.strategy is ShardingStrategy.HYBRID_SHARD_ZERO2:
        value, fields = "HYBRID_SHARD", {"strategy": ShardingStrategy.HYBRID_SHARD}
    changed = _replaced(question, fields)
    return Change({option: value}, changed) if changed else None


def _more_gpus(question: Question) -> Change | None:
    """Return the question with 2, 4, 8 or 16 times the GPUs: the first whose peak is under the card's memory."""
    best = None
    for factor in (2, 4, 8, 16):
        world = factor * question.setup.world_size
        option, count, hardware = _larger(question.hardware, world)
        changed = _replaced(question, {"world_size": world}, hardware)
        if changed is None:
            break
        best = Change({option: str(count)}, changed)
        if _memory(changed).peak_allocated_bytes < 0.9 * _card_bytes(changed):
            break
    return best


def _larger(hardware: Cluster | Gpu | None, world: int) -> tuple[str, int, Cluster | Gpu | None]:
    """Return the option, its value and the hardware for a larger world: a full node first, then more nodes."""
    if not isinstance(hardware, Cluster):
        return "--world-size", world, hardware
    each = hardware.gpus_per_node
    if hardware.num_nodes == 1 and world <= hardware.server.gpus_per_node:
        return "--gpus-per-node", world, msgspec.structs.replace(hardware, gpus_per_node=world)
    return "--nodes", world // each, msgspec.structs.replace(hardware, num_nodes=world // each)


def _replaced(question: Question, fields: dict[str, Any], hardware: Cluster | Gpu | None = None) -> Question | None:
    try:
        setup: TrainSetup = msgspec.structs.replace(question.setup, **fields)
    except SpecError:
        return None
    changed = replace(question, setup=setup, hardware=hardware or question.hardware)
    return None if setup == question.setup or changed.impossible else changed


def _memory(question: Question) -> MemoryPrediction:
    return predict_memory(question.model, question.setup, question.kernel_set)


def _needed(remedy: Remedy) -> int:
    return remedy.prediction.needed_bytes


def _card_bytes(question: Question) -> int:
    return (question.gpu.usable_memory_bytes or 0) if question.gpu else 0
