"""The fastest setting that fits on so many servers of one kind.

Of each setting the two largest micro-batches are looked at whose live bytes fit. Steps are timed in the order of their
computation alone, until no other can be faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from fsdp_bench.plan.estimate import available_bytes, communicators_for, predict_memory
from fsdp_bench.plan.purchase.goal import Goal
from fsdp_bench.plan.purchase.memory import LiveBytes
from fsdp_bench.plan.purchase.settings import Setting, can_run, micro_batches, setting_of, settings, setup_of
from fsdp_bench.plan.speed import speed
from fsdp_bench.replay.host_memory import Build, host_memory
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.spec.hardware import Cluster, Gpu, Server
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Api, Offload, ShardingStrategy, TrainSetup

_STEPS = "gradient_accumulation_steps"
NEVER = 2**62
"""More bytes than any GPU has."""


@dataclass(frozen=True)
class Timed:
    """A setup on a cluster, and its predicted speed."""

    cluster: Cluster
    setup: TrainSetup
    tokens_per_second_per_gpu: float

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.tokens_per_second_per_gpu * self.cluster.world_size


class Simulated:
    """What was simulated for a goal, shared by all kinds of servers: live bytes, and the speed of computation alone."""

    def __init__(self, goal: Goal, most_nodes: int) -> None:
        self.goal, self.most_nodes = goal, most_nodes
        self._live: dict[tuple[Kernels, int, Setting, int], LiveBytes] = {}
        self._computation: dict[tuple[str, Setting, int], float] = {}

    def live_bytes(self, kernels: Kernels, gpus_per_node: int, setting: Setting, batch: int) -> LiveBytes:
        """Return the live bytes of a setting and micro-batch, by the number of ranks."""
        key = kernels, gpus_per_node, setting, batch
        if key not in self._live:
            fewest = gpus_per_node * (2 if setting.strategy.is_hybrid else 1)
            most = max(self.most_nodes * gpus_per_node, fewest)
            goal = self.goal
            if goal.global_batch_tokens is not None:
                # what one micro-batch leaves for the next is the same for two and for more
                goal = replace(goal, global_batch_tokens=None, fixed={**goal.fixed, _STEPS: 2})

            def simulate(ranks: int) -> int:
                setup = setup_of(goal, setting, batch, ranks // gpus_per_node, gpus_per_node)
                if setup is None or not can_run(goal, setup):
                    return NEVER
                return predict_memory(goal.model, setup, kernels).peak_allocated_bytes

            self._live[key] = LiveBytes(simulate, fewest, most)
        return self._live[key]

    def without_communication(self, most: Cluster, setting: Setting, batch: int) -> float:
        """Return the most tokens per second of one GPU if collectives took no time, under any strategy.

        FSDP1's FULL_SHARD on the most servers computes least: it copies nothing that it gathers, and no rank's part of
        the optimizer's step is smaller.
        """
        alike = setting._replace(strategy=ShardingStrategy.FULL_SHARD, api=Api.FSDP1)
        key = most.gpu.name, alike, batch
        if key not in self._computation:
            goal = replace(self.goal, global_batch_tokens=None)
            setup = setup_of(goal, alike, batch, most.num_nodes, most.gpus_per_node)
            assert setup is not None
            accumulates = self.goal.global_batch_tokens is not None
            seconds = step_seconds(self.goal.model, setup, most, without_communication=True)
            if accumulates and seconds is not None:  # at best the optimizer's time does not count
                twice = msgspec.structs.replace(setup, gradient_accumulation_steps=2)
                both = step_seconds(self.goal.model, twice, most, without_communication=True)
                seconds = (both or 0.0) - seconds
            self._computation[key] = batch * setup.sequence_length / seconds if seconds else 0.0
        return self._computation[key]


def step_seconds(
    model: Model, setup: TrainSetup, cluster: Cluster, without_communication: bool = False
) -> float | None:
    """Return the time of a step. Beyond the third each micro-batch takes as long as the third."""
    count = setup.gradient_accumulation_steps
    few = [setup] if count <= 3 else [msgspec.structs.replace(setup, gradient_accumulation_steps=n) for n in (2, 3)]
    times = [speed(model, one, cluster, without_communication=without_communication).time.step_seconds for one in few]
    if None in times:
        return None
    known = [time for time in times if time is not None]
    return known[-1] + (count - len(known) - 1) * (known[-1] - known[0]) if len(known) > 1 else known[0]


class Fastest:
    """Finds the fastest settings of one goal on one kind of server."""

    def __init__(self, simulated: Simulated, server: Server, gpu: Gpu, gpus_per_node: int) -> None:
        self.goal, self._simulated = simulated.goal, simulated
        self.server, self.gpu, self.gpus_per_node = server, gpu, gpus_per_node
        self._kernels = kernels_on(CUDA, gpu)
        self._most = self.cluster(max(simulated.most_nodes, 2))
        self._refused: dict[tuple[Setting, int], int] = {}
        """The most nodes on which the allocator was found to have no room for a setting and micro-batch."""

    def cluster(self, num_nodes: int) -> Cluster:
        """Return so many of the servers."""
        return Cluster(server=self.server, gpu=self.gpu, num_nodes=num_nodes, gpus_per_node=self.gpus_per_node)

    def on(self, num_nodes: int, among: Iterable[Setting] | None = None) -> list[Timed]:
        """Return the settings whose live bytes fit so many servers and that may be the fastest, the fastest first."""
        cluster, found = self.cluster(num_nodes), list[Timed]()
        for bound, setup in self._candidates(cluster, settings(self.goal) if among is None else among):
            best = max((one.tokens_per_second_per_gpu for one in found), default=0.0)
            if bound <= best:
                break
            seconds = step_seconds(self.goal.model, setup, cluster)
            reached = setup.tokens_per_step_per_rank / seconds if seconds else 0.0
            found.append(Timed(cluster, setup, reached))
        return sorted(found, key=lambda one: -one.tokens_per_second_per_gpu)

    def refuse(self, timed: Timed) -> None:
        """Leave a setting out on so many nodes and on fewer."""
        key = setting_of(timed.setup), timed.setup.micro_batch_size
        self._refused[key] = max(self._refused.get(key, 0), timed.cluster.num_nodes)

    def _candidates(self, cluster: Cluster, among: Iterable[Setting]) -> list[tuple[float, TrainSetup]]:
        """Return the setups that may fit, each with the speed of its computation alone, the fastest first."""
        found = []
        for setting in among:
            for batch in self._largest(setting, cluster):
                setup = self._setup(setting, batch, cluster.num_nodes)
                if setup is not None and can_run(self.goal, setup) and self._host_fits(setup, cluster):
                    found.append((self._simulated.without_communication(self._most, setting, batch), setup))
        return sorted(found, key=lambda pair: -pair[0])

    def _largest(self, setting: Setting, cluster: Cluster) -> list[int]:
        """Return the two largest micro-batches that may fit."""
        found: list[int] = []
        for batch in micro_batches(self.goal):
            if self._setup(setting, batch, cluster.num_nodes) is None:
                if found:
                    break  # more than the global batch
            elif self._may_fit(setting, batch, cluster):
                found.append(batch)
            else:
                break
        return found[-2:]

    def _setup(self, setting: Setting, batch: int, num_nodes: int) -> TrainSetup | None:
        return setup_of(self.goal, setting, batch, num_nodes, self.gpus_per_node)

    def _may_fit(self, setting: Setting, batch: int, cluster: Cluster) -> bool:
        if cluster.num_nodes <= self._refused.get((setting, batch), 0):
            return False
        setup = self._setup(setting, batch, cluster.num_nodes)
        assert setup is not None
        communicators = communicators_for(self.goal.model, setup, cluster)
        available = available_bytes(self.gpu, communicators, self.goal.headroom_bytes) or 0
        live = self._simulated.live_bytes(self._kernels, self.gpus_per_node, setting, batch)
        return live.may_fit(cluster.world_size, available)

    def _host_fits(self, setup: TrainSetup, cluster: Cluster) -> bool:
        if setup.offload is Offload.NONE:
            return True
        limit = cluster.server.host_memory_bytes
        needed = host_memory(self.goal.model, setup, cluster.gpus_per_node, Build.META).peak_bytes
        return limit is not None and needed <= limit
