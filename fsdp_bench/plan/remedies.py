"""Changes that make a setup fit: other settings or more GPUs. Each change is predicted before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

import msgspec

from fsdp_bench.plan.defaults import USUAL_GPUS_PER_NODE
from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.plan.prediction import Prediction, answer, answer_if_it_fits
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.search.quantity import MOST_GPUS
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.recording.model import lora_of
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Offload, OptimizerKind, ShardingStrategy, TrainSetup

MOST = 4
"""The most remedies that are proposed."""
GAIN = 0.03
"""If nothing fits, a setting is proposed if it saves at least this fraction of the peak."""

Switch = Callable[[Question], tuple[str, Question] | None]
"""Changes one setting. Returns the CLI option (``--api fsdp2``) and the changed question, or None."""


def _setting(options: str, only_if: Callable[[TrainSetup], bool] = lambda _setup: True, **fields: Any) -> Switch:
    """Return the switch that changes fields of a setup for which ``only_if`` holds, if it can run then."""

    def switch(question: Question) -> tuple[str, Question] | None:
        try:
            setup = msgspec.structs.replace(question.setup, **fields)
        except SpecError:
            return None
        changed = replace(question, setup=setup)
        is_useful = setup != question.setup and only_if(question.setup) and not changed.impossible
        return (options, changed) if is_useful else None

    return switch


def _load(question: Question) -> tuple[str, Question] | None:
    return None if question.build is Build.META else ("--load meta", replace(question, build=Build.META))


def _segments(question: Question) -> tuple[str, Question] | None:
    if question.expandable_segments:
        return None
    return "--expandable-segments", question.on_same_steps(expandable_segments=True)


def _offloaded(question: Question) -> tuple[str, Question] | None:
    """Offload parameters, which takes FSDP."""
    if question.setup.is_bare:
        full = ShardingStrategy.FULL_SHARD
        return _setting("--strategy FULL_SHARD --offload params", offload=Offload.PARAMS, strategy=full)(question)
    return _setting("--offload params", offload=Offload.PARAMS)(question)


def _half(question: Question) -> tuple[str, Question] | None:
    half = question.setup.micro_batch_size // 2
    return _setting(f"--batch {half}", micro_batch_size=half)(question) if half else None


def _reduces_once(setup: TrainSetup) -> bool:
    """Whether gradients stay unsharded until the last of several micro-batches."""
    return setup.gradient_accumulation_steps > 1 and not setup.sync_every_micro_batch and not setup.is_ddp


_SWITCHES: dict[str, Switch] = {
    "load": _load,
    "segments": _segments,
    "no offload": _setting("--offload none", offload=Offload.NONE),
    "api": _setting("--api fsdp2", api=Api.FSDP2),
    "optimizer": _setting(
        "--optimizer adamw-fused",
        lambda setup: setup.optimizer is OptimizerKind.ADAMW_FOREACH,
        optimizer=OptimizerKind.ADAMW_FUSED,
    ),
    "loss": _setting("--loss chunked", lambda setup: setup.loss is Loss.PLAIN, loss=Loss.CHUNKED),
    "sync": _setting("--sync-every-micro-batch on", _reduces_once, sync_every_micro_batch=True),
    "strategy": _setting(  # over the group, and the group over all ranks
        "--strategy FULL_SHARD",
        lambda setup: setup.world_size > 1,
        strategy=ShardingStrategy.FULL_SHARD,
        shard_size=None,
    ),
    "checkpointing": _setting("--checkpointing full", checkpointing=Checkpointing.FULL),
    "batch": _half,
    "offload": _offloaded,
}
"""Changes by the name of their setting, ordered by lost speed. An optimizer on the CPU loses the most."""
GPUS = "gpus"
"""The name of the setting that is the number of GPUs."""
ON_MORE_GPUS = ("load", "segments", "no offload", "api", "optimizer", "loss", "sync", "strategy", "checkpointing")
"""Settings that are changed together with the number of GPUs."""


@dataclass(frozen=True)
class Alternative:
    """A question with changed settings: the name of each setting, and its CLI option."""

    question: Question
    switches: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> str:
        """The CLI options to change."""
        return " ".join(self.switches.values())

    def with_switch(self, name: str) -> Alternative | None:
        """Return the alternative with one more setting changed."""
        found = _SWITCHES[name](self.question)
        return None if found is None else Alternative(found[1], {**self.switches, name: found[0]})

    def on_world(self, world: int) -> Alternative | None:
        """Return the alternative on ``world`` GPUs, sharded if there are several; None if it cannot run there."""
        asked = self.question
        option, hardware = _hardware(asked.hardware, world)
        strategy = ShardingStrategy.FULL_SHARD if asked.setup.is_bare else asked.setup.strategy
        option += f" --strategy {strategy.value}" if asked.setup.is_bare else ""
        try:
            setup = msgspec.structs.replace(asked.setup, world_size=world, strategy=strategy)
        except SpecError:
            return None
        changed = replace(asked, setup=setup, hardware=hardware)
        return None if changed.impossible else Alternative(changed, {**self.switches, GPUS: option})


@dataclass(frozen=True)
class Remedy:
    """An alternative with its prediction."""

    switch: str
    """The CLI options to change."""
    prediction: Prediction

    @property
    def cost(self) -> tuple[int, float]:
        """The sort key of remedies: number of GPUs, then step time."""
        seconds = self.prediction.speed.time.step_seconds if self.prediction.fits else None
        return self.prediction.setup.world_size, inf if seconds is None else seconds


def remedies(prediction: Prediction) -> list[Remedy]:
    """Return up to MOST changes with which the setup fits, the cheapest first.

    If none fits, return the changes that save the most memory. If the setup fits or nothing helps, return no change;
    likewise on a GPU whose attention is not predicted, where no change is known to fit. Takes a second or two.
    """
    if prediction.fits is not False or not prediction.knows_attention:
        return []
    advice = _Advice(prediction.question)
    found = advice.on_the_same_gpus()
    if len(found) < MOST - 1:
        found += advice.on_more_gpus()
    fitting = {change.options: change for change in found}
    if fitting:
        made = [Remedy(text, advice.predicted(change)) for text, change in fitting.items()]
        return sorted(made, key=lambda remedy: remedy.cost)[:MOST]
    return advice.helpful(prediction)


class _Advice:
    """Changes of one question that was predicted not to fit. Each change is predicted once."""

    def __init__(self, question: Question) -> None:
        self.asked = Alternative(question)
        is_offloaded = question.setup.offload is Offload.PARAMS
        self.names = tuple(name for name in _SWITCHES if name != ("offload" if is_offloaded else "no offload"))
        self._known: dict[str, Prediction] = {}
        self._fits: dict[str, bool] = {}

    def predicted(self, change: Alternative) -> Prediction:
        """Return the prediction of a change."""
        text = change.options
        if text not in self._known:
            self._known[text] = answer(change.question)
        return self._known[text]

    def fits(self, change: Alternative) -> bool:
        """Return whether a change is predicted to fit; False if that is unknown."""
        text = change.options
        if text not in self._fits:
            found = answer_if_it_fits(change.question) if _may_fit(change.question) else None
            self._fits[text] = found is not None
            if found is not None:
                self._known[text] = found
        return self._fits[text]

    def on_the_same_gpus(self) -> list[Alternative]:
        """Return single changes with which the setup fits; if there are none, the fewest changes that suffice."""
        single = (change for name in self.names if (change := self.asked.with_switch(name)) and self.fits(change))
        found = list(islice(single, MOST - 1))
        change = self.asked
        for name in self.names if not found else ():
            change = change.with_switch(name) or change
            if change is not self.asked and self.fits(change):
                return [self._with_what_is_needed(change, None)]
        return found

    def on_more_gpus(self) -> list[Alternative]:
        """Return the fewest GPUs that suffice: with all changes that save memory, with all but the api, with none."""
        kinds = (ON_MORE_GPUS, tuple(name for name in ON_MORE_GPUS if name != "api"), ())
        found = [change for names in kinds if (change := self._with_more_gpus(names))]
        if not found and (last := self._with_more_gpus((*ON_MORE_GPUS, "batch", "offload"))):
            found.append(last)
        return found

    def _with_more_gpus(self, names: Sequence[str]) -> Alternative | None:
        """Return the fewest GPUs that suffice with some changed settings, and only the settings needed there."""
        base = self.asked
        for name in names:
            base = (base.with_switch(name) if name in self.names else None) or base
        world = self._fewest(base)
        larger = base.on_world(world) if world else None
        return self._with_what_is_needed(larger, world) if larger else None

    def _with_what_is_needed(self, change: Alternative, world: int | None) -> Alternative:
        """Undo changes that are not needed to fit, the slowest first."""
        for name in [name for name in reversed(change.switches) if name not in (GPUS, "no offload")]:
            less: Alternative | None = self.asked
            for kept in change.switches:
                if kept not in (name, GPUS):
                    less = less and less.with_switch(kept)
            less = less and (less if world is None else less.on_world(world))
            if less is not None and self.fits(less):
                change = less
        return change

    def _fewest(self, change: Alternative) -> int | None:
        """Return the fewest GPUs, more than now, that suffice for a change."""
        worlds = larger_worlds(change.question)

        def holds(index: int, condition: Callable[[Alternative], bool]) -> bool:
            larger = change.on_world(worlds[index])
            return larger is not None and condition(larger)

        return fewest(
            worlds,
            lambda index: holds(index, lambda larger: _may_fit(larger.question)),
            lambda index: holds(index, self.fits),
        )

    def helpful(self, prediction: Prediction) -> list[Remedy]:
        """Return the single changes that save the most memory, if nothing fits."""
        peak = prediction.memory.peak_allocated_bytes
        changes = [change for name in self.names if (change := self.asked.with_switch(name))]
        live = [(_live_bytes(change.question), change) for change in changes]
        best = sorted((pair for pair in live if pair[0] <= (1 - GAIN) * peak), key=lambda pair: pair[0])[: MOST - 1]
        made = [Remedy(change.options, self.predicted(change)) for _, change in best]
        less = [remedy for remedy in made if remedy.prediction.needed_bytes < prediction.needed_bytes]
        return sorted(less, key=lambda remedy: remedy.prediction.needed_bytes)


def smaller_bases(prediction: Prediction) -> tuple[str, ...]:
    """Return smaller ways to store adapters' frozen weights; not predicted, as recording takes minutes."""
    lora = lora_of(prediction.model)
    if prediction.fits is not False or lora is None or lora.is_quantized:
        return ()
    rest = msgspec.structs.replace(lora, base=None).text()
    found = (f"--qlora {rest}: frozen weights of linear layers in 4 bits, not predicted here",)
    if lora.base is None and prediction.setup.precision.store == "fp32":
        return (f"--lora {rest},base=bf16: frozen weights in half the bytes, not predicted here", *found)
    return found


def _may_fit(question: Question) -> bool:
    """Return whether live bytes and host memory are within their limits. Takes milliseconds."""
    return _live_bytes(question) <= (question.available_bytes or 0) and question.host_memory_fraction <= 1


def _live_bytes(question: Question) -> int:
    return predict_memory(question.simulated).peak_allocated_bytes


def with_twice_the_gpus(prediction: Prediction) -> Remedy | None:
    """Return the same setup on twice the GPUs, whether or not that helps. None if it cannot run there."""
    larger = Alternative(prediction.question).on_world(2 * prediction.setup.world_size)
    return Remedy(larger.options, answer(larger.question)) if larger else None


# -- the same setup on more GPUs ---------------------------------------------------------------------------------------


def larger_worlds(question: Question) -> list[int]:
    """Return the larger world sizes to try: up to a full node, then whole nodes."""
    hardware, now = question.hardware, question.setup.world_size
    if hardware is not None and hardware.has_server:
        node = _gpus_per_node(hardware)
    else:
        node = USUAL_GPUS_PER_NODE if now <= USUAL_GPUS_PER_NODE or now % USUAL_GPUS_PER_NODE == 0 else now
    return [*range(now + 1, node), *(count for count in range(node, MOST_GPUS + 1, node) if count > now)]


def _hardware(hardware: Hardware | None, world: int) -> tuple[str, Hardware | None]:
    if hardware is None or not hardware.has_server:
        return f"--world-size {world}", hardware
    each = _gpus_per_node(hardware)
    if world <= each:
        return f"--gpus-per-node {world}", msgspec.structs.replace(hardware, gpus_per_node=world)
    nodes = world // each
    return f"--nodes {nodes}", msgspec.structs.replace(hardware, num_nodes=nodes, gpus_per_node=each)


def _gpus_per_node(hardware: Hardware) -> int:
    """Return the GPUs of a node among several like it: all of a lone node's, as many as several nodes already use."""
    return hardware.server.gpus_per_node if hardware.num_nodes == 1 else hardware.gpus_per_node


def fewest(worlds: Sequence[int], may_fit: Callable[[int], bool], fits: Callable[[int], bool]) -> int | None:
    """Return the smallest world size on which a setup fits; None if it does not fit on the largest.

    A larger one nearly always needs less, so it bisects ``worlds``, by index: first ``may_fit``, which takes little
    time, then ``fits``. Then it tries the next two smaller ones, in case one of them fits too.
    """
    if not worlds or not may_fit(len(worlds) - 1):
        return None
    low, high = -1, len(worlds) - 1  # the last index that cannot fit, and one that may
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if may_fit(middle) else (middle, high)
    lowest = high
    index, stride, failed = lowest, 1, lowest - 1
    while not fits(index):
        if index == len(worlds) - 1:
            return None
        failed, index, stride = index, min(index + stride, len(worlds) - 1), 2 * stride
    while index - failed > 1:
        middle = (failed + index) // 2
        failed, index = (failed, middle) if fits(middle) else (middle, index)
    for smaller in range(index - 1, max(lowest, index - 2) - 1, -1):
        index = smaller if fits(smaller) else index
    return worlds[index]
