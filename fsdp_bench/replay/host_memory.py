"""Host memory of one node with CPU offload: what the ranks of a node hold there, pinned copies included.

Not covered: the processes themselves (Python, torch, the CUDA driver: some GiB a rank), data loaders, the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.models.activation_offload import ACTIVATIONS
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.optimizers.dispatch import states
from fsdp_bench.simulate.optimizers.offloaded import is_offloaded
from fsdp_bench.simulate.recorded.simulation import simulation_of
from fsdp_bench.simulate.repeat import FEW_BLOCKS
from fsdp_bench.simulate.simulation import Simulation
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Offload, OptimizerKind, TrainSetup


class Build(StrEnum):
    """Where the model is instantiated before it is sharded."""

    META = "meta"
    """Every rank on the meta device; nothing is in host memory."""
    RANK_0 = "rank-0"
    """One rank of the world in host memory; the others get their shards from it (sync_module_states)."""
    EVERY_RANK = "every-rank"
    """Every rank in host memory: a node then holds the model as often as it has GPUs."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes on one node, all its ranks together."""

    pinned_parameters_bytes: int
    pinned_gradients_bytes: int
    optimizer_state_bytes: int
    temporary_bytes: int
    """Temporary bytes of the optimizer's step on the CPU."""
    load_bytes: int
    """While the model is built, before it is sharded."""
    pinned_activations_bytes: int = 0
    """The bytes that blocks save for backward, under activation offload."""

    @property
    def peak_bytes(self) -> int:
        """The larger of building and training."""
        training = self.pinned_parameters_bytes + self.pinned_gradients_bytes + self.pinned_activations_bytes
        return max(self.load_bytes, training + self.optimizer_state_bytes + self.temporary_bytes)


def pinned_bytes(num_bytes: int) -> int:
    """Return what one pinned tensor takes: a power of two (aten/src/ATen/core/CachingHostAllocator.h, PowerOf2Ceil)."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def host_memory(shape: Model, setup: TrainSetup, ranks_per_node: int, build: Build = Build.META) -> HostMemory:
    """Return one node's host memory. Without offload only building the model needs any."""
    found = _without_activations(shape, setup, ranks_per_node, build)
    if not setup.activation_offload:
        return found
    return replace(found, pinned_activations_bytes=ranks_per_node * _pinned_activations(shape, setup))


def _pinned_activations(shape: Model, setup: TrainSetup) -> int:
    """Return what one rank's blocks have copied to the host when a forward pass ends."""
    most = copied = 0
    for event in steady_step(shape, setup, CUDA).last_step():
        if event.kind is Kind.MARK and event.label == "backward":
            most, copied = max(most, copied), 0
        elif event.kind is Kind.COPY and event.work is not None and event.work.group == ACTIVATIONS:
            copied += pinned_bytes(event.work.num_bytes) if event.work.name == "to_host" else 0
    return most


def _without_activations(shape: Model, setup: TrainSetup, ranks_per_node: int, build: Build) -> HostMemory:
    copies = {Build.META: 0, Build.RANK_0: 1, Build.EVERY_RANK: ranks_per_node}[build]
    load = copies * shape.num_parameters * setup.precision.store_bytes
    if setup.offload is Offload.NONE:
        return HostMemory(0, 0, 0, 0, load)
    if setup.offload is Offload.OPTIMIZER:
        return _of_offloaded_optimizer(shape, setup, ranks_per_node, load)
    shards, held = _shards(shape, setup)
    pinned = sum(count * pinned_bytes(num_bytes) for num_bytes, count in shards)
    return HostMemory(
        pinned_parameters_bytes=ranks_per_node * pinned,
        pinned_gradients_bytes=ranks_per_node * pinned,
        optimizer_state_bytes=ranks_per_node * _state_bytes(shape, setup),
        temporary_bytes=ranks_per_node * held if setup.optimizer is OptimizerKind.ADAMW_FOREACH else 0,
        load_bytes=load,
    )


def _of_offloaded_optimizer(shape: Model, setup: TrainSetup, ranks_per_node: int, load: int) -> HostMemory:
    """Return what torchao's CPUOffloadOptimizer holds: pinned copies, AdamW's states, one parameter's temporaries."""
    simulation = _simulated(shape, setup)
    sizes = [
        (shard.numel * shard.itemsize, simulation.model.times(shard.block))
        for shard in simulation.wrapper.shards(simulation.model)
        if is_offloaded(shard)
    ]
    pinned = ranks_per_node * sum(times * pinned_bytes(num_bytes) for num_bytes, times in sizes)
    temporaries = {OptimizerKind.ADAMW_FOREACH: 1, OptimizerKind.ADAMW_FOR_LOOP: 2}.get(setup.optimizer, 0)
    return HostMemory(
        pinned_parameters_bytes=pinned,
        pinned_gradients_bytes=pinned,
        optimizer_state_bytes=ranks_per_node * 2 * sum(times * num_bytes for num_bytes, times in sizes),
        temporary_bytes=ranks_per_node * temporaries * max((num_bytes for num_bytes, _ in sizes), default=0),
        load_bytes=load,
    )


def _state_bytes(shape: Model, setup: TrainSetup) -> int:
    """Return what the optimizer of one rank keeps for all that it updates."""
    simulation = _simulated(shape, setup)
    total = 0
    for shard in simulation.wrapper.shards(simulation.model):
        op = Operators(Tape(), CUDA)
        held = states(op, setup.optimizer, [shard])
        total += sum(one.num_bytes for one in held) * simulation.model.times(shard.block)
    return total


def _simulated(shape: Model, setup: TrainSetup) -> Simulation:
    """Return a simulation of few blocks, of which one stands for the others; of all where they are not alike."""
    few = min(shape.num_blocks, FEW_BLOCKS) if shape.repeats else shape.num_blocks
    simulation = simulation_of(shape, setup, CUDA, few)
    return simulation if simulation.blocks_are_alike else simulation_of(shape, setup, CUDA, shape.num_blocks)


def _shards(shape: Model, setup: TrainSetup) -> tuple[list[tuple[int, int]], int]:
    """Return this rank's pinned tensors as (bytes, how many), and the bytes that the optimizer updates."""
    simulation = _simulated(shape, setup)
    times = simulation.model.times
    pinned = [(num_bytes, times(block)) for num_bytes, block in simulation.wrapper.host_tensors()]
    shards = simulation.wrapper.shards(simulation.model)
    held = sum(shard.numel * shard.itemsize * times(shard.block) for shard in shards)
    return pinned, held
