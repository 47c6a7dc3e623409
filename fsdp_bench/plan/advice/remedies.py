"""Changes that make a setup fit: other settings or more GPUs. Each change is predicted before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

import msgspec

from fsdp_bench.plan.advice.larger_world import fewest, larger_worlds, on_world
from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.plan.prediction import Prediction, answer, answer_if_it_fits
from fsdp_bench.plan.question import Question
from fsdp_bench.replay.host_memory import Build, host_memory
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import lora_of
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Offload, OptimizerKind, ShardingStrategy

MOST = 4
"""The most remedies that are proposed."""
GAIN = 0.03
"""If nothing fits, a setting is proposed if it saves at least this fraction of the peak."""

Switch = Callable[[Question], tuple[str, Question] | None]
"""Changes one setting. Returns the CLI option (``--api fsdp2``) and the changed question, or None."""


@dataclass(frozen=True)
class Alternative:
    """A question with changed settings: the name of each setting, and its CLI option."""

    question: Question
    switches: dict[str, str] = field(default_factory=dict)

    def with_switch(self, name: str) -> Alternative | None:
        """Return the alternative with one more setting changed."""
        found = _SWITCHES[name](self.question)
        return None if found is None else Alternative(found[1], {**self.switches, name: found[0]})

    def on_world(self, world: int) -> Alternative | None:
        """Return the alternative on ``world`` GPUs."""
        found = on_world(self.question, world)
        return None if found is None else Alternative(found[2], {**self.switches, GPUS: f"{found[0]} {found[1]}"})


GPUS = "gpus"
"""The name of the setting that is the number of GPUs."""


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


def _setting(option: str, value: str, **fields: Any) -> Switch:
    def switch(question: Question) -> tuple[str, Question] | None:
        try:
            setup = msgspec.structs.replace(question.setup, **fields)
        except SpecError:
            return None
        changed = replace(question, setup=setup)
        return None if setup == question.setup or changed.impossible else (f"{option} {value}", changed)

    return switch


def _load(question: Question) -> tuple[str, Question] | None:
    return None if question.build is Build.META else ("--load meta", replace(question, build=Build.META))


def _segments(question: Question) -> tuple[str, Question] | None:
    if question.expandable_segments:
        return None
    return "--expandable-segments", question.on_same_steps(expandable_segments=True)


def _fused(question: Question) -> tuple[str, Question] | None:
    if question.setup.optimizer is not OptimizerKind.ADAMW_FOREACH:
        return None
    return _setting("--optimizer", "adamw-fused", optimizer=OptimizerKind.ADAMW_FUSED)(question)


def _chunked(question: Question) -> tuple[str, Question] | None:
    return _setting("--loss", "chunked", loss=Loss.CHUNKED)(question) if question.setup.loss is Loss.PLAIN else None


def _sharded(question: Question) -> tuple[str, Question] | None:
    """Shard parameters over the group, and the group over all ranks."""
    if question.setup.world_size == 1:
        return None
    return _setting("--strategy", "FULL_SHARD", strategy=ShardingStrategy.FULL_SHARD, shard_size=None)(question)


def _synchronized(question: Question) -> tuple[str, Question] | None:
    """Reduce gradients in every micro-batch, so that none stay unsharded."""
    setup = question.setup
    if setup.gradient_accumulation_steps == 1 or setup.sync_every_micro_batch or setup.is_ddp:
        return None
    return _setting("--sync-every-micro-batch", "on", sync_every_micro_batch=True)(question)


def _offloaded(question: Question) -> tuple[str, Question] | None:
    """Offload parameters, which takes FSDP."""
    if question.setup.is_bare:
        full = ShardingStrategy.FULL_SHARD
        return _setting("--strategy", "FULL_SHARD --offload params", offload=Offload.PARAMS, strategy=full)(question)
    return _setting("--offload", "params", offload=Offload.PARAMS)(question)


def _half(question: Question) -> tuple[str, Question] | None:
    half = question.setup.micro_batch_size // 2
    return _setting("--batch", str(half), micro_batch_size=half)(question) if half else None


_SWITCHES: dict[str, Switch] = {
    "load": _load,
    "segments": _segments,
    "no offload": _setting("--offload", "none", offload=Offload.NONE),
    "api": _setting("--api", "fsdp2", api=Api.FSDP2),
    "optimizer": _fused,
    "loss": _chunked,
    "sync": _synchronized,
    "strategy": _sharded,
    "checkpointing": _setting("--checkpointing", "full", checkpointing=Checkpointing.FULL),
    "batch": _half,
    "offload": _offloaded,
}
"""Changes by the name of their setting, ordered by lost speed. An optimizer on the CPU loses the most."""
ON_MORE_GPUS = ("load", "segments", "no offload", "api", "optimizer", "loss", "sync", "strategy", "checkpointing")
"""Settings that are changed together with the number of GPUs."""


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
    fitting = {_switches_text(change): change for change in found}
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
        text = _switches_text(change)
        if text not in self._known:
            self._known[text] = answer(change.question)
        return self._known[text]

    def fits(self, change: Alternative) -> bool:
        """Return whether a change is predicted to fit; False if that is unknown."""
        text = _switches_text(change)
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
        made = [Remedy(_switches_text(change), self.predicted(change)) for _, change in best]
        less = [remedy for remedy in made if remedy.prediction.needed_bytes < prediction.needed_bytes]
        return sorted(less, key=lambda remedy: remedy.prediction.needed_bytes)


def smaller_bases(prediction: Prediction) -> tuple[str, ...]:
    """Return how adapters' frozen weights would be smaller, if a setup does not fit; each records the model anew.

    They are not predicted: a recording takes minutes.
    """
    lora = lora_of(prediction.model)
    if prediction.fits is not False or lora is None or lora.is_quantized:
        return ()
    rest = msgspec.structs.replace(lora, base=None).text()
    found = (f"--qlora {rest}: frozen weights of linear layers in 4 bits, not predicted here",)
    if lora.base is None and prediction.setup.precision.store == "fp32":
        return (f"--lora {rest},base=bf16: frozen weights in half the bytes, not predicted here", *found)
    return found


def _switches_text(change: Alternative) -> str:
    return " ".join(change.switches.values())


def _may_fit(question: Question) -> bool:
    """Return whether live bytes and host memory are within their limits. Takes milliseconds."""
    hardware = question.hardware
    if _live_bytes(question) > (question.available_bytes or 0):
        return False
    if hardware is None or hardware.server.host_memory_bytes is None:
        return True
    needed = host_memory(question.simulated, hardware.gpus_per_node, question.build).peak_bytes
    return needed <= hardware.server.host_memory_bytes


def _live_bytes(question: Question) -> int:
    return predict_memory(question.simulated).peak_allocated_bytes


def with_twice_the_gpus(prediction: Prediction) -> Remedy | None:
    """Return the same setup on twice the GPUs, whether or not that helps. None if it cannot run there."""
    larger = Alternative(prediction.question).on_world(2 * prediction.setup.world_size)
    return Remedy(_switches_text(larger), answer(larger.question)) if larger else None
