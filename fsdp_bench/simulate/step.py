"""Training steps of one rank as events: one in the steady state, and the first ones.

``SimulatedSteps`` has both of one model and setup: made when they are asked for, and handed to those who read logs.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, Self

from msgspec.structs import replace

from fsdp_bench.simulate.candidate_ranks import candidate_ranks
from fsdp_bench.simulate.models.build import num_few_blocks, with_few_tokens
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels
from fsdp_bench.simulate.repeat import FEW_BLOCKS, MORE_BLOCKS, Log, replaced_tensors
from fsdp_bench.simulate.simulation import Simulation, simulation_of
from fsdp_bench.simulate.wrappers.ddp import Ddp
from fsdp_bench.simulate.wrappers.fsdp1 import Fsdp1
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import Api, ShardingStrategy, TrainSetup, Wrap


class SimulatedSteps:
    """Training steps of a model and setup, simulated when asked for. ``any_depth``: those whose logs it shares."""

    def __init__(self, model: Model, setup: TrainSetup, kernels: Kernels = CUDA, any_depth: Self | None = None) -> None:
        self.model, self.setup, self.kernels = model, setup, kernels
        self.any_depth = any_depth
        self._steps: dict[tuple[int, bool], Log] = {}
        self._first_steps: dict[tuple[int, bool], Log] = {}

    def step(self, rank: int = 0, every_block: bool = False) -> Log:
        """Return the log of loading and of one step in the steady state; of every block, or of few where one counts."""
        key = rank, every_block
        if key not in self._steps:
            shared = self.any_depth.step(rank) if self.any_depth and not every_block else None
            fewest = self.model.num_blocks if every_block else FEW_BLOCKS
            self._steps[key] = self._of_this_depth(shared) or self._simulated(self._steady_step, rank, fewest)
        return self._steps[key]

    def first_steps(self, rank: int = 0, every_block: bool = False) -> Log:
        """Return the log of loading and of the first STEPS steps, for the caching allocator."""
        key = rank, every_block
        if key not in self._first_steps:
            shared = self.any_depth.first_steps(rank) if self.any_depth and not every_block else None
            fewest = self.model.num_blocks if every_block else MORE_BLOCKS
            log = self._of_this_depth(shared) or self._simulated(_first_steps, rank, fewest, for_memory=True)
            self._first_steps[key] = log
        return self._first_steps[key]

    def _of_this_depth(self, shared: Log | None) -> Log | None:
        return shared.of_depth(self.model.num_blocks) if shared and shared.extra_blocks else None

    @cached_property
    def candidate_ranks(self) -> list[int]:
        """Ranks of which one has the highest peak, in ascending order; mostly rank 0 alone."""
        return candidate_ranks(self.model, self.setup, self.kernels)

    @property
    def for_memory(self) -> list[Log]:
        """The steps of the candidate ranks, for readers of memory alone."""
        if self.setup.is_ddp and not self.setup.is_bare:
            return [self._under_ddp]
        return [self.step(rank) for rank in self.candidate_ranks]

    @cached_property
    def _under_ddp(self) -> Log:
        """Simulate every block for time: DDP's buckets end inside blocks. Only hooks' casts matter to live memory."""
        return self._simulated(self._steady_step, 0, FEW_BLOCKS, for_memory=True)

    @property
    def wrapped(self) -> Simulation:
        """The wrapped model before it is loaded: few blocks, of which one stands for others; all if they differ."""
        simulation = self._simulation(num_few_blocks(self.model))
        return simulation if simulation.blocks_are_alike else self._simulation(self.model.num_blocks)

    def _simulation(self, num_blocks: int, rank: int = 0) -> Simulation:
        return simulation_of(self.model, self.setup, self.kernels, num_blocks, rank)

    def _simulated(
        self, run: Callable[[Simulation, int], Log], rank: int, num_blocks: int, for_memory: bool = False
    ) -> Log:
        """Simulate a few blocks, at least so many, where one of them may stand for the others, or all."""
        model, fewest = self.model, MORE_BLOCKS if _leaves_more_behind(self.setup) else num_blocks
        with without_collections():
            for count in sorted({fewest, MORE_BLOCKS}):
                if num_blocks <= count < model.num_blocks and model.repeats:
                    simulation = self._simulation(count, rank)
                    if not (simulation.blocks_are_alike or (for_memory and simulation.allocates_alike)):
                        break
                    log = run(simulation, model.num_blocks - count)
                    if log.is_sound:
                        return log
            return run(self._simulation(model.num_blocks, rank), 0)

    def _steady_step(self, simulation: Simulation, extra_blocks: int) -> Log:
        model, setup = self.model, self.setup
        if isinstance(simulation.wrapper, Fsdp1):
            small = _as_small_as_units_allow(model, setup)
            few = _with_few_ranks(with_few_tokens(model, setup))
            simulation.wrapper.events_left = _events_left(small, few, self.kernels)
        elif isinstance(simulation.wrapper, Ddp):
            simulation.wrapper.numels_in_order = self._arrivals()
        simulation.load()
        simulation.warm_up()
        simulation.step()
        return simulation.log(extra_blocks)

    def _arrivals(self) -> list[int]:
        """Return the elements of DDP's gradients in the order in which they come; a model of few blocks shows it."""
        simulation = self._simulation(num_few_blocks(self.model))
        simulation.load()
        simulation.step()
        return simulation.wrapper.numels_of_all_blocks() if isinstance(simulation.wrapper, Ddp) else []

    def on(self, kernels: Kernels) -> "SimulatedSteps":
        """Return the steps on other kernels; these where they are the same."""
        return self if kernels == self.kernels else SimulatedSteps(self.model, self.setup, kernels)

    def forget(self) -> None:
        """Keep no logs: those who keep many answers do not need the events that led to them."""
        self._steps.clear()
        self._first_steps.clear()
        self.__dict__.pop("_under_ddp", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send no logs to other processes."""
        return type(self), (self.model, self.setup, self.kernels)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedSteps) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.model, self.setup, self.kernels))


def for_any_depth(model: Model, setup: TrainSetup) -> Model | None:
    """Return the model whose log is that of all deeper models of its width, ``Log.of_depth``; None where none is.

    Other parts of the log depend on the number of layers, too: clipping, which holds one number a gradient, units
    chosen by size, DistributedDataParallel's buckets, and which blocks are checkpointed.
    """
    counts_blocks = setup.max_grad_norm is not None or setup.policy.is_of_blocks
    is_any_depth = setup.is_bare if setup.is_ddp else setup.wrap.has_blocks
    if counts_blocks or not is_any_depth or not model.repeats or model.num_blocks <= MORE_BLOCKS + 1:
        return None
    return replace(model.with_blocks(MORE_BLOCKS + 1), name="any depth")


_ENOUGH_BLOCKS = 3
"""Enough for a step to end as it does with all blocks: prefetching reaches two units ahead."""


def _as_small_as_units_allow(model: Model, setup: TrainSetup) -> Model:
    """Return a small model with the same units: how events follow each other depends on nothing else."""
    if isinstance(model, RecordedModel):
        return model.with_blocks(num_few_blocks(model)) if model.repeats else model
    layers = min(model.num_hidden_layers, _ENOUGH_BLOCKS)
    if setup.wrap is Wrap.SIZE:
        return replace(model, num_hidden_layers=layers)
    return ModelShape(
        name="units",
        family=model.family,
        num_hidden_layers=layers,
        hidden_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=1,
        tie_word_embeddings=model.tie_word_embeddings,
    )


def _with_few_ranks(setup: TrainSetup) -> TrainSetup:
    """Return a setup in whose process groups are few ranks, for what only the order of events matters to."""
    if setup.shard_group_size <= 2:
        return setup
    return replace(setup, world_size=4 if setup.strategy.is_hybrid else 2, shard_size=None)


@lru_cache(maxsize=256)
def _events_left(model: Model, setup: TrainSetup, kernels: Kernels) -> int:
    """Return how many frees FSDP1's rate limiter has not waited for at the end of a step."""
    if not setup.limit_all_gathers or setup.effective_strategy is ShardingStrategy.NO_SHARD:
        return 0
    simulation = simulation_of(model, setup, kernels, model.num_blocks)
    simulation.load()
    for _ in range(2):
        simulation.step()
    return simulation.wrapper.num_free_events if isinstance(simulation.wrapper, Fsdp1) else 0


def _first_steps(simulation: Simulation, extra_blocks: int) -> Log:
    """Simulate steps until one is as those that follow it, which is the second or the third.

    The optimizer's states come to life at the end of the first step, in the gaps that its activations left.
    """
    simulation.load()
    simulation.step()
    pairs = None
    while pairs is None and len(simulation.steps) < STEPS:
        simulation.step()
        last = simulation.steps[-1]
        pairs = replaced_tensors(simulation.tape.events[: last.stop], last.start)
    del simulation.tape.events[simulation.steps[-1].stop :]
    return simulation.log(extra_blocks, STEPS - len(simulation.steps), pairs)


STEPS = 4
"""The number of steps after which reserved memory is read: see repeat.py."""


def _leaves_more_behind(setup: TrainSetup) -> bool:
    """Whether few blocks are never alike: FSDP1 then frees in backward what each block gathered in forward."""
    return setup.api is Api.FSDP1 and setup.effective_strategy in (
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.HYBRID_SHARD_ZERO2,
    )


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause Python's collector of cycles: a simulation makes many objects and few cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
