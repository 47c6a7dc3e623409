"""Host memory of one node with CPU offload: what the ranks of a node hold there, pinned copies included.

Not covered: the processes themselves (Python, torch, the CUDA driver: some GiB a rank), data loaders, the page cache.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.models.activation_checkpointing import ACTIVATIONS
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.optimizers.dispatch import is_offloaded, state_sizes
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.simulation import Simulation
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.setup import Offload, OptimizerKind


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


def host_memory(simulated: SimulatedSteps, ranks_per_node: int, build: Build = Build.META) -> HostMemory:
    """Return one node's host memory. Without offload only building the model needs any."""
    setup, copies = simulated.setup, {Build.META: 0, Build.RANK_0: 1, Build.EVERY_RANK: ranks_per_node}[build]
    load = copies * simulated.model.num_parameters * setup.precision.store_bytes
    found = HostMemory(0, 0, 0, 0, load)
    if setup.offload is Offload.OPTIMIZER:
        found = _of_offloaded_optimizer(simulated.wrapped, ranks_per_node, load)
    elif setup.offload is Offload.PARAMS:
        found = _of_offloaded_parameters(simulated.wrapped, ranks_per_node, load)
    if not setup.activation_offload:
        return found
    return replace(found, pinned_activations_bytes=ranks_per_node * _pinned_activations(simulated.step()))


def _pinned_activations(log: Log) -> int:
    """Return what one rank's blocks have copied to the host when a forward pass ends."""
    most = copied = 0
    for event in log.last_step():
        if event.kind is Kind.MARK and event.label == "backward":
            most, copied = max(most, copied), 0
        elif event.kind is Kind.COPY and event.work is not None and event.work.group == ACTIVATIONS:
            copied += pinned_bytes(event.work.num_bytes) if event.work.name == "to_host" else 0
    return most


def _of_offloaded_parameters(simulation: Simulation, ranks_per_node: int, load: int) -> HostMemory:
    """Return what FSDP's CPU offload holds: pinned parameters and gradients, and what the optimizer on the CPU needs.

    One block of the simulation may stand for others.
    """
    kind, wrapper, times = simulation.setup.optimizer, simulation.wrapper, simulation.model.times
    pinned = ranks_per_node * sum(pinned_bytes(size) * times(block) for size, block in wrapper.host_tensors())
    shards, kept = wrapper.shards(simulation.model), 0
    for shard in shards:
        kept += sum(size for _, size in state_sizes(CUDA, kind, shard)) * times(shard.block)
    held = sum(shard.numel * shard.itemsize * times(shard.block) for shard in shards)
    return HostMemory(
        pinned_parameters_bytes=pinned,
        pinned_gradients_bytes=pinned,
        optimizer_state_bytes=ranks_per_node * kept,
        temporary_bytes=ranks_per_node * held if kind is OptimizerKind.ADAMW_FOREACH else 0,
        load_bytes=load,
    )


def _of_offloaded_optimizer(simulation: Simulation, ranks_per_node: int, load: int) -> HostMemory:
    """Return what torchao's CPUOffloadOptimizer holds: pinned copies, AdamW's states, one parameter's temporaries."""
    sizes = [
        (shard.numel * shard.itemsize, simulation.model.times(shard.block))
        for shard in simulation.wrapper.shards(simulation.model)
        if is_offloaded(shard)
    ]
    kind = simulation.setup.optimizer
    pinned = ranks_per_node * sum(times * pinned_bytes(num_bytes) for num_bytes, times in sizes)
    temporaries = {OptimizerKind.ADAMW_FOREACH: 1, OptimizerKind.ADAMW_FOR_LOOP: 2}.get(kind, 0)
    return HostMemory(
        pinned_parameters_bytes=pinned,
        pinned_gradients_bytes=pinned,
        optimizer_state_bytes=ranks_per_node * 2 * sum(times * num_bytes for num_bytes, times in sizes),
        temporary_bytes=ranks_per_node * temporaries * max((num_bytes for num_bytes, _ in sizes), default=0),
        load_bytes=load,
    )
