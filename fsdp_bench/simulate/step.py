"""One training step of one rank, as train/step.py runs it, recorded as events."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from fsdp_bench.simulate import repeat as program
from fsdp_bench.simulate.autograd import CUDA_BLOCK_BYTES, Engine, Storage, Tape, Tensor
from fsdp_bench.simulate.events import Category, Event, Stream
from fsdp_bench.simulate.further_steps import handed_on
from fsdp_bench.simulate.issued import Timeline
from fsdp_bench.simulate.live_memory import SIMULATED_BLOCKS, Course, Peak, Replay
from fsdp_bench.simulate.models.activation_checkpointing import checkpointed
from fsdp_bench.simulate.models.transformer import Transformer
from fsdp_bench.simulate.operators import optimizer
from fsdp_bench.simulate.operators.clipping import clip_gradients, clip_sharded_fsdp1, reduce_norm_of_host_gradients
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import FP32, INT64, Kernels
from fsdp_bench.simulate.operators.loss import loss
from fsdp_bench.simulate.operators.precision import Sizes
from fsdp_bench.simulate.operators.scaler import Scaler
from fsdp_bench.simulate.repeat import Program
from fsdp_bench.simulate.symbolic import traced
from fsdp_bench.simulate.worst_rank import candidate_ranks
from fsdp_bench.simulate.wrappers.ddp import Ddp
from fsdp_bench.simulate.wrappers.fsdp1 import Fsdp1
from fsdp_bench.simulate.wrappers.fsdp2 import Fsdp2
from fsdp_bench.simulate.wrappers.units import blocks_are_alike, choose_units
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, ShardingStrategy, TrainSetup

BETWEEN_STEPS = "between steps"
"""Not a phase of its own: where the simulation puts what earlier steps have left."""

_MICRO_BATCHES = 3
"""Micro-batches that are simulated: the first, the last, and one between them, which all others equal."""


class Simulation:
    """A model, its wrapper and its optimizer on one tape."""

    def __init__(
        self,
        shape: ModelShape,
        setup: TrainSetup,
        kernels: Kernels,
        num_blocks: int,
        timeline: Timeline | None = None,
        rank: int = 0,
    ) -> None:
        self.shape = shape
        self.setup = setup
        self.has_dtensors = setup.api is Api.FSDP2 and setup.strategy is not ShardingStrategy.NO_SHARD
        self.tape = Tape(1 if kernels.observed else CUDA_BLOCK_BYTES, timeline)
        self.op = Operators(self.tape, kernels)
        self.engine = Engine(self.tape, accumulates_in_place=not kernels.observed)
        self.model = Transformer(self.op, shape, num_blocks)
        self.sizes = Sizes.of(setup.precision)
        self.on_host = not kernels.is_cuda
        units = choose_units(self.model, setup)
        self.is_stretchable = blocks_are_alike(self.model, units, setup)
        if setup.checkpointing is not Checkpointing.NONE:
            for block in self.model.blocks:
                block.around = checkpointed(self.op, setup.checkpointing)
        given = self.op, self.engine, self.model, units, setup, self.sizes, self.on_host
        # Of the other wrappers only rank 0 is simulated, which has the most.
        self.wrapper: Any = Fsdp1(*given, rank) if setup.api is Api.FSDP1 else _fsdp2(setup)(*given)
        self.steps_on_host = setup.offload is Offload.PARAMS and not self.on_host
        """The optimizer's work is in host memory, apart from the device's."""
        self.resident: list[Storage] = []
        self.states: list[Storage] | None = None
        """The optimizer's; None before its first step."""
        self.scaler: Scaler | None = None
        self.zero_scalar: Storage | None = None
        self.end = 0
        """Events up to the end of the last step's optimizer."""

    def load(self) -> None:
        """Build and wrap the model."""
        tape = self.tape
        tape.mark("load")
        if self.op.kernels.mesh and (self.has_dtensors or self.setup.strategy.is_hybrid):
            ranks = tape.storage(
                4 * self.setup.world_size, "DeviceMesh", Category.TEMPORARY
            )  # a dry run's is elsewhere
            self.resident.append(ranks)
        self.resident += self.wrapper.load()
        tape.mark(BETWEEN_STEPS)
        self.shards = self.wrapper.shards(self.model)
        if self.setup.precision.needs_grad_scaler:
            self.scaler = Scaler(self.op, self.setup.api is Api.FSDP1, self.has_dtensors, self.steps_on_host)

    def warm_up(self) -> None:
        """Be as the first step leaves it: its first forward has begun once, and the optimizer has its states."""
        self._begin_first_forward()
        self.op.make_workspaces()
        self.states = self._optimizer_states()
        if self.setup.max_grad_norm is not None:
            self._make_zero_scalar()
        self.wrapper.after_a_step()
        if self.scaler is not None and self.setup.api is Api.FSDP1:
            self.wrapper.when_nothing_loaded_is_left(self.scaler.make_scale)
        elif self.scaler is not None:
            self.scaler.make_scale()

    def _begin_first_forward(self) -> None:
        """What the wrapper does once, before the first forward's first operator."""
        given, total = self._given(), self.tape.tensor(1, FP32, "aten::zeros")
        tokens = given[0] if given else self._tokens()
        inputs = self._inputs(tokens)
        self.tape.mark("forward")
        self.wrapper.lazy_init()
        self.tape.mark(BETWEEN_STEPS)
        del given, total, tokens, inputs

    def _given(self) -> list[Tensor]:
        """Return all micro-batches of a step, where they are made on the device itself."""
        return [self._tokens() for _ in range(self.setup.gradient_accumulation_steps)] if self.on_host else []

    def _tokens(self) -> Tensor:
        """Return one micro-batch: the inputs, and a token more. The host waits for its copy from pageable memory."""
        numel = self.setup.micro_batch_size * (self.setup.sequence_length + 1)
        tokens = self.tape.tensor(numel, INT64, "tokens")
        if not self.on_host:
            self.tape.synchronize(Stream.COMPUTE)
        return tokens

    def _inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets: views of one sequence, copies of several."""
        batch, length = self.setup.micro_batch_size, self.setup.sequence_length
        if batch == 1:
            return tokens.view(length), tokens.view(length)
        inputs = self.tape.tensor(batch * length, INT64, "aten::clone")
        return inputs, self.tape.tensor(batch * length, INT64, "aten::clone")

    def step(self) -> None:
        """train/step.py, train_step."""
        setup, tape = self.setup, self.tape
        given, total = self._given(), tape.tensor(1, FP32, "aten::zeros")
        count = min(setup.gradient_accumulation_steps, _MICRO_BATCHES)
        for index in range(count):
            is_last = index == count - 1
            self.wrapper.reduces_gradients = setup.sync_every_micro_batch or is_last
            stands_for = setup.gradient_accumulation_steps - count
            tape.repeats = 1 + stands_for if count == _MICRO_BATCHES and index == 1 else 1
            tape.timeline.repeat(tape.repeats)
            tokens = given[index] if given else self._tokens()
            share = self.forward_backward(tokens)
            del tokens, share
        tape.repeats = 1
        tape.timeline.repeat(1)
        tape.mark("optimizer")
        self.optimizer_step()
        del total, given
        self.end = len(tape.events)
        tape.mark(BETWEEN_STEPS)
        tape.synchronize_device()  # who trains looks at the loss; train/processes/measurement.py times the step

    def forward_backward(self, tokens: Tensor) -> Tensor:
        """train/step.py, _forward_backward."""
        setup, tape = self.setup, self.tape
        self.op.batch = setup.micro_batch_size
        inputs, targets = self._inputs(tokens)
        tape.mark("forward")
        logits: Any = self.model(inputs, setup.sequence_length)
        tape.mark("loss")
        out = self.op.divide(loss(self.op, setup.loss, logits, targets))
        del logits
        tape.mark("backward")
        scaled = self.scaler.scale(out) if self.scaler is not None else out
        ones = tape.tensor(1, FP32, "aten::ones_like", Category.TEMPORARY)  # held by torch.autograd.backward
        self.engine.run(scaled, ones)
        del ones
        return out.detach()

    def optimizer_step(self) -> None:
        """train/step.py, _optimizer_step."""
        if self.scaler is not None:
            self.scaler.unscale()
            self._over_gradients("aten::_amp_foreach_non_finite_check_and_unscale_", 2)
        if self.setup.max_grad_norm is not None:
            self._clip()
        if self.scaler is not None:
            self.tape.synchronize(Stream.COMPUTE)  # GradScaler.step asks whether there was an overflow
        if self.states is None:
            self.states = self._optimizer_states()
        optimizer.issue(self.tape, self.setup.optimizer, self.shards, self.steps_on_host)
        if not self.steps_on_host:
            optimizer.step(self.tape, self.setup.optimizer, self.shards, self.on_host)
        if self.scaler is not None:
            self.scaler.update()
        self.wrapper.zero_grad()

    def _over_gradients(self, name: str, passes: int) -> None:
        """Issue an operator over all gradients, block by block, where they are on the device."""
        timeline = self.tape.timeline
        if not timeline.is_on or self.steps_on_host:
            return
        for block, group in groupby(self.shards, key=lambda shard: shard.block):
            timeline.mark("optimizer", block)
            shards = list(group)
            num_bytes = passes * sum(shard.numel * shard.itemsize for shard in shards)
            timeline.run(name, num_bytes, shards[0].itemsize)
        timeline.mark("optimizer", -1)

    def _optimizer_states(self) -> list[Storage]:
        if self.steps_on_host:
            return []
        return optimizer.states(self.tape, self.setup.optimizer, self.shards, self.on_host)

    def _make_zero_scalar(self) -> None:
        """FullyShardedDataParallel.clip_grad_norm_ makes it once, on the host; its way to the device is waited for."""
        if self.zero_scalar is None and self.setup.api is Api.FSDP1:
            self.zero_scalar = self.tape.storage(FP32, "_zero_scalar", Category.TEMPORARY)
            self.tape.synchronize(Stream.COMPUTE)

    def _clip(self) -> None:
        """train/step.py, clip_gradients, with as many gradients as the whole model has."""
        self._make_zero_scalar()
        self._over_gradients("aten::_foreach_norm", 1)
        self._over_gradients("aten::_foreach_mul_", 2)
        is_sharded_fsdp1 = (
            self.setup.api is Api.FSDP1 and self.setup.effective_strategy is not ShardingStrategy.NO_SHARD
        )
        if self.steps_on_host:
            if is_sharded_fsdp1:
                reduce_norm_of_host_gradients(self.tape)
            return
        shards = [shard for shard in self.shards if optimizer.counts(shard)]
        simulated = sum(shard.block >= 0 for shard in shards)
        count = len(shards) - simulated
        count += simulated * self.shape.num_hidden_layers // len(self.model.blocks)
        if is_sharded_fsdp1:
            self.tape.send("all_reduce", "shard", FP32)
            clip_sharded_fsdp1(self.tape, count, self.sizes.store)
        else:
            is_distributed = self.has_dtensors and self.setup.shard_group_size > 1
            if is_distributed:  # the norms of all gradients, one by one
                self.tape.send("all_reduce", "shard", count * self.sizes.store)
            clip_gradients(self.tape, count, self.sizes.store, is_distributed)


def _fsdp2(setup: TrainSetup) -> Any:
    return Ddp if setup.strategy is ShardingStrategy.NO_SHARD else Fsdp2


@dataclass(frozen=True)
class Step:
    """One step, and how many blocks the stretched one stands for besides itself."""

    course: Course
    """Its sizes may be symbolic: those of the model that was simulated."""
    num_bytes: Sequence[int]
    """Of each event."""
    extra_blocks: int
    rank: int

    @classmethod
    def of(cls, events: list[Event], rank: int) -> Step:
        """Return a step of which every block is there."""
        return cls(Course.of(events), [event.num_bytes for event in events], 0, rank)

    @property
    def events(self) -> list[Event]:
        """What happens, with sizes."""
        return [
            event._replace(num_bytes=num_bytes)
            for event, num_bytes in zip(self.course.events, self.num_bytes, strict=True)
        ]

    def replay(self) -> Replay:
        """Follow the live bytes."""
        return self.course.replay(self.num_bytes, self.extra_blocks)

    def breakdown(self, peak: Peak) -> dict[str, int]:
        """Return what is alive at a peak, by category."""
        return self.course.breakdown(self.num_bytes, peak, self.extra_blocks)


def simulate(
    shape: ModelShape,
    setup: TrainSetup,
    kernels: Kernels,
    num_blocks: int = SIMULATED_BLOCKS,
    others_follow: bool = False,
    rank: int | None = None,
) -> Step:
    """Return the events of loading and of one step in the steady state.

    At most ``num_blocks`` blocks are simulated, or all of them where they are not alike (see memory.py).
    ``others_follow``: this setup will be asked for with other models, too (see symbolic.py).
    ``rank``: by default the one with the highest peak, the lowest of equals.
    """
    if rank is None:
        candidates = candidate_ranks(shape, setup, kernels)
        steps = [simulate(shape, setup, kernels, num_blocks, others_follow, one) for one in candidates]
        return steps[0] if len(steps) == 1 else max(steps, key=lambda step: step.replay().peak_bytes)
    extra = shape.num_hidden_layers - num_blocks
    if extra > 0:
        course, num_bytes = traced(_stretchable, shape, setup, kernels, num_blocks, rank, others_follow=others_follow)
        if course is not None:
            return Step(course, num_bytes, extra, rank)
    return Step.of(_steady_step(Simulation(shape, setup, kernels, shape.num_hidden_layers, rank=rank)), rank)


def _stretchable(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, num_blocks: int, rank: int
) -> tuple[Course | None, list[int]]:
    """Return what a model of so many blocks does, and sizes; None where they cannot stand for more of them."""
    simulation = Simulation(shape, setup, kernels, num_blocks, rank=rank)
    if not simulation.is_stretchable:
        return None, []
    events = _steady_step(simulation)
    return Course.of(events), [event[2] for event in events]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Pause Python's collector of cycles: a simulation makes many objects and few cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _steady_step(simulation: Simulation) -> list[Event]:
    with _without_collections():
        simulation.load()
        simulation.warm_up()
        simulation.step()
    return _events(simulation.tape)


STEPS = 4
"""After how many steps an allocator is asked what it has reserved: see further_steps.py."""


def first_steps(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, others_follow: bool = False, rank: int | None = None
) -> Program:
    """Return loading and the first STEPS steps, every block: what a caching allocator goes through.

    The optimizer's states come to life at the end of the first step, in the gaps that its activations left.
    ``others_follow``, ``rank``: as for ``simulate``.
    """
    if rank is None:
        rank = _worst_rank(shape, setup, kernels, others_follow)
    extra = shape.num_hidden_layers - program.SIMULATED_BLOCKS
    if extra > 0:
        (instructions, further), sizes = traced(_alike, shape, setup, kernels, rank, others_follow=others_follow)
        if instructions is not None:
            return Program(replace(instructions, num_bytes=array("q", sizes)), extra, further)
    return program.plain(*_first_steps(Simulation(shape, setup, kernels, shape.num_hidden_layers, rank=rank)))


def _worst_rank(shape: ModelShape, setup: TrainSetup, kernels: Kernels, others_follow: bool) -> int:
    candidates = candidate_ranks(shape, setup, kernels)
    if len(candidates) == 1:
        return candidates[0]
    return simulate(shape, setup, kernels, others_follow=others_follow).rank


def _alike(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, rank: int
) -> tuple[tuple[program.Instructions | None, int], Sequence[int]]:
    """Return what a model's blocks do in these steps, how often the last one is repeated, and sizes.

    No instructions where blocks differ.
    """
    simulation = Simulation(shape, setup, kernels, program.SIMULATED_BLOCKS, rank=rank)
    if not simulation.is_stretchable:
        return (None, 0), ()
    events, pairs, further = _first_steps(simulation)
    found = program.alike(events, pairs)
    return (found, further), () if found is None else found.num_bytes


def _first_steps(simulation: Simulation) -> tuple[list[Event], program.Pairs, int]:
    """Simulate steps until one is as those that follow it, which is the second or the third.

    Returns what was simulated, what that step hands on (further_steps.py), and how many follow it.
    """
    with _without_collections():
        simulation.load()
        simulation.step()
        pairs, done = None, 1
        while pairs is None and done < STEPS:
            begin = simulation.end
            simulation.step()
            pairs, done = handed_on(simulation.tape.events[: simulation.end], begin), done + 1
    return _events(simulation.tape)[: simulation.end], pairs or (), STEPS - done


def events_of_first_steps(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, rank: int | None = None
) -> list[Event]:
    """Return the same with every block and every step simulated."""
    rank = _worst_rank(shape, setup, kernels, others_follow=False) if rank is None else rank
    simulation = Simulation(shape, setup, kernels, shape.num_hidden_layers, rank=rank)
    simulation.load()
    for _ in range(STEPS):
        simulation.step()
    return _events(simulation.tape)[: simulation.end]


def _events(tape: Tape) -> list[Event]:
    """Take what was recorded off a tape: what ends with the simulation is no part of it, and goes on being written."""
    events, tape.events = tape.events, []
    return events
