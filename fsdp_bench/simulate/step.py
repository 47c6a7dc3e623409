"""Training steps of one rank as events: one in the steady state, and the first ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

from msgspec.structs import replace

from fsdp_bench.simulate.further_steps import replaced_tensors
from fsdp_bench.simulate.models.build import with_few_tokens
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.recorded.simulation import simulation_of
from fsdp_bench.simulate.repeat import FEW_BLOCKS, MORE_BLOCKS, Log
from fsdp_bench.simulate.simulation import Simulation
from fsdp_bench.simulate.wrappers.ddp import Ddp
from fsdp_bench.simulate.wrappers.fsdp1 import Fsdp1
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import Api, ShardingStrategy, TrainSetup, Wrap


def for_any_depth(shape: Model, setup: TrainSetup) -> Model | None:
    """Return the model whose log is that of all deeper models of its width, ``Log.of_depth``; None where none is.

    What depends on the number of layers beside the number of blocks: clipping, which holds one number a gradient,
    units chosen by size, DistributedDataParallel's buckets, and which blocks are checkpointed.
    """
    counts_blocks = setup.max_grad_norm is not None or setup.policy.is_of_blocks
    is_any_depth = setup.is_bare if setup.is_ddp else setup.wrap.has_blocks
    if counts_blocks or not is_any_depth or not shape.repeats:
        return None
    return replace(shape.with_blocks(min(shape.num_blocks, MORE_BLOCKS + 1)), name="any depth")


@lru_cache(maxsize=512)
def steady_step(shape: Model, setup: TrainSetup, kernels: Kernels, rank: int = 0, num_blocks: int = FEW_BLOCKS) -> Log:
    """Return the log of loading and of one step in the steady state; all readers share it."""
    shallow = for_any_depth(shape, setup) if num_blocks <= MORE_BLOCKS else None
    if shallow is not None and shape.num_blocks > shallow.num_blocks:
        log = steady_step(shallow, setup, kernels, rank, num_blocks)
        if log.extra_blocks:
            return log.of_depth(shape.num_blocks)
    return _simulated(partial(_load_and_step, shape, setup, kernels), shape, setup, kernels, rank, num_blocks)


def memory_of_a_step(shape: Model, setup: TrainSetup, kernels: Kernels, rank: int = 0) -> Log:
    """Return the log of loading and of one step in the steady state, for readers of memory alone.

    DistributedDataParallel's buckets end in the middle of blocks, so that for its time every block is simulated. What
    is alive they change only where a hook casts them.
    """
    if setup.is_ddp and not setup.is_bare:
        return _memory_under_ddp(shape, setup, kernels)
    return steady_step(shape, setup, kernels, rank)


@lru_cache(maxsize=8)
def _memory_under_ddp(shape: Model, setup: TrainSetup, kernels: Kernels) -> Log:
    run = partial(_load_and_step, shape, setup, kernels)
    return _simulated(run, shape, setup, kernels, 0, FEW_BLOCKS, for_memory=True)


def _load_and_step(shape: Model, setup: TrainSetup, kernels: Kernels, simulation: Simulation, extra_blocks: int) -> Log:
    if isinstance(simulation.wrapper, Fsdp1):
        small = _as_small_as_units_allow(shape, setup)
        simulation.wrapper.events_left = _events_left(small, with_few_tokens(shape, setup), kernels)
    elif isinstance(simulation.wrapper, Ddp):
        simulation.wrapper.numels_in_order = _arrivals(shape, setup, kernels)
    simulation.load()
    simulation.warm_up()
    simulation.step()
    return simulation.log(extra_blocks)


_ENOUGH_BLOCKS = 3
"""Enough for a step to end as it does with all blocks: prefetching reaches two units ahead."""


def _as_small_as_units_allow(shape: Model, setup: TrainSetup) -> Model:
    """Return a small model with the same units: how events follow each other depends on nothing else."""
    if isinstance(shape, RecordedModel):
        return shape.with_blocks(min(shape.num_blocks, FEW_BLOCKS)) if shape.repeats else shape
    layers = min(shape.num_hidden_layers, _ENOUGH_BLOCKS)
    if setup.wrap is Wrap.SIZE:
        return replace(shape, num_hidden_layers=layers)
    return ModelShape(
        name="units",
        family=shape.family,
        num_hidden_layers=layers,
        hidden_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=1,
        tie_word_embeddings=shape.tie_word_embeddings,
    )


@lru_cache(maxsize=64)
def _events_left(shape: Model, setup: TrainSetup, kernels: Kernels) -> int:
    """Return how many frees FSDP1's rate limiter has not waited for at the end of a step."""
    if not setup.limit_all_gathers or setup.effective_strategy is ShardingStrategy.NO_SHARD:
        return 0
    simulation = simulation_of(shape, setup, kernels, shape.num_blocks)
    simulation.load()
    for _ in range(2):
        simulation.step()
    return simulation.wrapper.num_free_events if isinstance(simulation.wrapper, Fsdp1) else 0


def _arrivals(shape: Model, setup: TrainSetup, kernels: Kernels) -> list[int]:
    """Return the elements of DDP's gradients in the order in which they come; a model of few blocks shows it."""
    few = min(shape.num_blocks, FEW_BLOCKS) if shape.repeats else shape.num_blocks
    simulation = simulation_of(shape, setup, kernels, few)
    simulation.load()
    simulation.step()
    return simulation.wrapper.numels_of_all_blocks() if isinstance(simulation.wrapper, Ddp) else []


def first_steps(shape: Model, setup: TrainSetup, kernels: Kernels, rank: int = 0, num_blocks: int = MORE_BLOCKS) -> Log:
    """Return the log of loading and of the first STEPS steps, for the caching allocator.

    The optimizer's states come to life at the end of the first step, in the gaps that its activations left. Steps are
    simulated until one is as those that follow it, which is the second or the third.
    """

    def run(simulation: Simulation, extra_blocks: int) -> Log:
        simulation.load()
        simulation.step()
        pairs = None
        while pairs is None and len(simulation.steps) < STEPS:
            simulation.step()
            last = simulation.steps[-1]
            pairs = replaced_tensors(simulation.tape.events[: last.stop], last.start)
        del simulation.tape.events[simulation.steps[-1].stop :]
        return simulation.log(extra_blocks, STEPS - len(simulation.steps), pairs)

    return _simulated(run, shape, setup, kernels, rank, num_blocks, for_memory=True)


STEPS = 4
"""The number of steps after which reserved memory is read: see further_steps.py."""


def _simulated(
    run: Callable[[Simulation, int], Log],
    shape: Model,
    setup: TrainSetup,
    kernels: Kernels,
    rank: int,
    num_blocks: int,
    for_memory: bool = False,
) -> Log:
    """Simulate a few blocks where one of them may stand for the others, or all."""
    with without_collections():
        fewest = MORE_BLOCKS if _leaves_more_behind(setup) else num_blocks
        for count in sorted({fewest, MORE_BLOCKS}):
            if num_blocks <= count < shape.num_blocks and shape.repeats:
                simulation = simulation_of(shape, setup, kernels, count, rank)
                if not (simulation.blocks_are_alike or (for_memory and simulation.allocates_alike)):
                    break
                log = run(simulation, shape.num_blocks - count)
                if log.is_sound:
                    return log
        return run(simulation_of(shape, setup, kernels, shape.num_blocks, rank), 0)


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
