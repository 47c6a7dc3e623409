"""Training steps of one rank as events: one in the steady state, and the first ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

from fsdp_bench.simulate.further_steps import handed_on
from fsdp_bench.simulate.models.transformer import Weight
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.repeat import FEW_BLOCKS, MORE_BLOCKS, Log
from fsdp_bench.simulate.simulation import Simulation
from fsdp_bench.simulate.wrappers.ddp import Ddp
from fsdp_bench.simulate.wrappers.fsdp1 import Fsdp1
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import ShardingStrategy, TrainSetup


@lru_cache(maxsize=4)
def steady_step(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, rank: int = 0, num_blocks: int = FEW_BLOCKS
) -> Log:
    """Return loading and one step in the steady state; all readers of a question share it."""

    def run(simulation: Simulation, extra_blocks: int) -> Log:
        if isinstance(simulation.wrapper, Fsdp1):
            simulation.wrapper.events_left = _events_left(shape, setup, kernels)
        elif isinstance(simulation.wrapper, Ddp):
            simulation.wrapper.arrivals = _arrivals(simulation.wrapper.weights, shape, setup, kernels)
        simulation.load()
        simulation.warm_up()
        simulation.step()
        return simulation.log(extra_blocks)

    return _simulated(run, shape, setup, kernels, rank, num_blocks)


_ENOUGH_BLOCKS = 3
"""For a step to end as with all blocks: prefetching reaches two units."""


@lru_cache(maxsize=64)
def _events_left(shape: ModelShape, setup: TrainSetup, kernels: Kernels) -> int:
    """Return how many frees FSDP1's rate limiter has not waited for at the end of a step."""
    if not setup.limit_all_gathers or setup.effective_strategy is ShardingStrategy.NO_SHARD:
        return 0
    simulation = Simulation(shape, setup, kernels, min(shape.num_hidden_layers, _ENOUGH_BLOCKS))
    simulation.load()
    for _ in range(2):
        simulation.step()
    return simulation.wrapper.num_free_events if isinstance(simulation.wrapper, Fsdp1) else 0


def _arrivals(weights: list[Weight], shape: ModelShape, setup: TrainSetup, kernels: Kernels) -> list[Weight]:
    """Return DDP's weights in the order in which the first step has their gradients, which few blocks show."""
    simulation = Simulation(shape, setup, kernels, min(shape.num_hidden_layers, _ENOUGH_BLOCKS))
    simulation.load()
    simulation.step()
    assert isinstance(simulation.wrapper, Ddp)
    places = {id(weight): place for place, weight in _by_place(simulation.wrapper.weights).items()}
    shown = [places[id(weight)] for weight in simulation.wrapper.arrivals]
    in_a_block = [number for block, number in shown if block == 0]
    first_of_blocks = next(place for place in shown if place[0] >= 0)
    order: list[tuple[int, int]] = []
    for place in shown:
        if place[0] < 0:
            order.append(place)
        elif place == first_of_blocks:
            order += [(block, number) for block in reversed(range(shape.num_hidden_layers)) for number in in_a_block]
    by_place = _by_place(weights)
    return [by_place[place] for place in order]


def _by_place(weights: list[Weight]) -> dict[tuple[int, int], Weight]:
    """Return weights by their block, or -1, and their number in it."""
    grouped: dict[int, int] = {}
    found = {}
    for weight in weights:
        number = grouped[weight.block] = grouped.get(weight.block, -1) + 1
        found[weight.block, number] = weight
    return found


def first_steps(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, rank: int = 0, num_blocks: int = MORE_BLOCKS
) -> Log:
    """Return loading and the first STEPS steps: what a caching allocator goes through.

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
            pairs = handed_on(simulation.tape.events[: last.stop], last.start)
        del simulation.tape.events[simulation.steps[-1].stop :]
        return simulation.log(extra_blocks, STEPS - len(simulation.steps), pairs)

    return _simulated(run, shape, setup, kernels, rank, num_blocks)


STEPS = 4
"""After how many steps an allocator is asked what it has reserved: see further_steps.py."""


def _simulated(
    run: Callable[[Simulation, int], Log],
    shape: ModelShape,
    setup: TrainSetup,
    kernels: Kernels,
    rank: int,
    num_blocks: int,
) -> Log:
    """Simulate a few blocks where one of them may stand for the others, or all."""
    with _without_collections():
        for count in sorted({num_blocks, MORE_BLOCKS}):
            if num_blocks <= count < shape.num_hidden_layers:
                simulation = Simulation(shape, setup, kernels, count, rank)
                if not simulation.blocks_are_alike:
                    break
                log = run(simulation, shape.num_hidden_layers - count)
                if log.is_sound:
                    return log
        return run(Simulation(shape, setup, kernels, shape.num_hidden_layers, rank), 0)


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
