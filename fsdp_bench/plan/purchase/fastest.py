"""The fastest setting that fits on so many servers of one kind.

For each setting, the two largest micro-batches are tried that fit by live bytes. Settings that compute the same are
tried together, in the order of their computation alone, until no other can be faster; those whose collectives alone
take too long are not timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import NamedTuple

from fsdp_bench.plan.estimate import available_bytes, communicators_for
from fsdp_bench.plan.prediction import Prediction, answer_if_it_fits
from fsdp_bench.plan.purchase.goal import Setting, can_run, micro_batches, setting_of
from fsdp_bench.plan.purchase.simulated import Sent, Simulated, computation_of, for_all_micro_batches, sending_alike
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.speed import speed
from fsdp_bench.rates.calibrated import rates_of
from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.host_memory import Build, host_memory
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Gpu, Hardware, Server
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Offload, ShardingStrategy, TrainSetup


@dataclass(frozen=True)
class Timed:
    """A setup on a cluster, and its predicted speed."""

    cluster: Hardware
    setup: TrainSetup
    tokens_per_second_per_gpu: float

    @property
    def tokens_per_second(self) -> float:
        """The speed of all GPUs together."""
        return self.tokens_per_second_per_gpu * self.cluster.world_size


class Reached(NamedTuple):
    """The speed of a setup on some nodes, from which a bound for other numbers of nodes follows."""

    num_nodes: int
    tokens_per_second_per_gpu: float
    work_seconds: float | None
    """The time of all but its collectives. None for several micro-batches, from which no bound follows."""


_CERTAIN = 0.99
"""The part of a step's time that a bound counts on. The rest leaves room for what shards are padded with, and for
operators that run beside other collectives when these take less time: without it, 4,688 drawn cases exceeded the bound
by at most 0.3 %."""


def _saves(setting: Setting) -> tuple[bool, bool, bool, bool]:
    """Return what a setting does to save memory; the more, the greater."""
    return (
        setting.offload is not Offload.NONE,
        setting.strategy is ShardingStrategy.FULL_SHARD,
        setting.checkpointing is Checkpointing.FULL,
        setting.loss is not Loss.PLAIN,
    )


class Fastest:
    """Finds the fastest settings of one goal on one kind of server."""

    def __init__(self, simulated: Simulated, server: Server, gpu: Gpu, gpus_per_node: int, times: float = 1.0) -> None:
        """Take a kind of server. Settings may fit if they do with live bytes so many times as high."""
        self._times = times
        self.others: Sequence[Fastest] = ()
        """Those of other kinds of servers, of which some may have the same GPUs and links."""
        self.goal, self._simulated = simulated.goal, simulated
        self.server, self.gpu, self.gpus_per_node = server, gpu, gpus_per_node
        self._kernels = kernels_on(CUDA, gpu)
        self._most = self.cluster(max(simulated.most_nodes, 2))
        self.refused: set[tuple[Setting, int, int]] = set()
        """Settings, micro-batches and numbers of nodes where the allocator has no room. It may have on fewer nodes."""
        self.reached: dict[TrainSetup, Reached] = {}
        self._alike: dict[tuple[Setting, int], dict[int, TrainSetup]] = {}
        """The setups with several numbers of nodes that were timed, by setting and micro-batch."""
        self._live_fits: dict[tuple[Setting, int, int], bool] = {}
        self._available_bytes: dict[tuple[ShardingStrategy, Api, int], int] = {}
        """The bytes that the allocator can reserve beside communicators, by strategy, API and number of nodes."""
        self._batches = cache(self._batches_of)
        self._collective_times: dict[TrainSetup, tuple[Sent, list[float | None]]] = {}

    def cluster(self, num_nodes: int) -> Hardware:
        """Return so many of the servers."""
        return Hardware(server=self.server, gpu=self.gpu, num_nodes=num_nodes, gpus_per_node=self.gpus_per_node)

    def steps(self, setup: TrainSetup) -> SimulatedSteps:
        """Return the steps of a setup on this GPU."""
        return self._simulated.steps(setup, self._kernels)

    def best(self, num_nodes: int, among: Iterable[Setting] | None = None) -> Timed | None:
        """Return the fastest setting whose live bytes fit so many servers; None if there is none.

        A setting is not timed if its computation alone, its collectives alone, or its time on other numbers of nodes
        shows that it is slower.
        """
        cluster, found, most = self.cluster(num_nodes), None, 0.0
        for alone, group in self._classes(cluster, self._simulated.settings if among is None else among):
            if found and alone <= most:
                break
            bounded = [(min(one, self.bound_by_others(made)), made) for one, made in self._candidates(cluster, group)]
            for bound, setup in sorted(bounded, key=lambda pair: -pair[0]):
                if found and bound <= most:
                    break
                if found and self._communication_alone(setup) <= most:
                    continue
                if (speed := self._speed(setup, cluster)) > most or found is None:
                    found, most = Timed(cluster, setup, speed), speed
        return found

    def bound_by_others(self, setup: TrainSetup) -> float:
        """Return tokens per second that a setup does not exceed, by what it reached on other numbers of nodes.

        Every path through a step becomes shorter by no more than all that takes less time: each collective, and
        all else, of which what works on shards takes less the more nodes there are.
        """
        known = self._alike.get((setting_of(setup), setup.micro_batch_size), {})
        if setup.gradient_accumulation_steps > 1 or not known:
            return inf
        nodes, tokens, limit = setup.world_size // self.gpus_per_node, setup.tokens_per_step_per_rank, inf
        on_more = [self.reached[one].work_seconds for count, one in known.items() if count >= nodes]
        least = min((seconds for seconds in on_more if seconds is not None), default=0.0)
        sent, now = self._each_collective(setup)
        if None in now:
            return inf
        for other in known.values():
            reached = self.reached[other]
            sent_before, before = self._each_collective(other)
            if reached.work_seconds is None or sent.order != sent_before.order or None in before:
                continue
            pairs = zip(before, now, sent.counts, strict=True)
            less = sum(max((was or 0.0) - (is_now or 0.0), 0.0) * count for was, is_now, count in pairs)
            less += max(reached.work_seconds - least, 0.0)
            seconds = _CERTAIN * tokens / reached.tokens_per_second_per_gpu - less
            limit = min(limit, tokens / seconds if seconds > 0 else inf)
        return limit

    def _each_collective(self, setup: TrainSetup) -> tuple[Sent, list[float | None]]:
        """Return the collectives of a step, and how long each of the different ones takes; None where it is unknown."""
        bare = sending_alike(setup)
        if bare not in self._collective_times:
            rates, sent = self._rates(bare), self._simulated.collectives(self._kernels, bare)
            times = [None if rates is None else rates.collective(work) for work in sent.different]
            self._collective_times[bare] = sent, times
        return self._collective_times[bare]

    def _classes(self, cluster: Hardware, among: Iterable[Setting]) -> list[tuple[float, list[Setting]]]:
        """Return settings that compute the same, with the speed of that alone at the largest batch, fastest first."""
        groups: dict[Setting, list[Setting]] = {}
        for setting in among:
            groups.setdefault(computation_of(setting), []).append(setting)
        found = []
        for group in groups.values():
            batches = [batch for setting in group for batch in self._batches(setting, cluster.num_nodes)]
            if batches:
                found.append((self._simulated.without_communication(self._most, group[0], max(batches)), group))
        return sorted(found, key=lambda pair: -pair[0])

    def _speed(self, setup: TrainSetup, cluster: Hardware) -> float:
        if setup not in self.reached:
            alike = (other.reached[setup] for other in self.others if self._is_timed_alike(other, setup))
            self.learn({setup: next(alike, None) or self._timed(setup, cluster)}, set())
        return self.reached[setup].tokens_per_second_per_gpu

    def _timed(self, setup: TrainSetup, cluster: Hardware) -> Reached:
        seconds = self._simulated.step_seconds(setup, cluster)
        rates = self._rates(setup)
        is_alone = bool(seconds) and rates is not None and setup.gradient_accumulation_steps == 1
        work = self._simulated.work_seconds(self._kernels, setup, rates) if is_alone and rates else None
        speed = setup.tokens_per_step_per_rank / seconds if seconds else 0.0
        return Reached(cluster.num_nodes, speed, work)

    def _is_timed_alike(self, other: Fastest, setup: TrainSetup) -> bool:
        """Return whether a setup was timed on another kind of server, on which everything takes as long."""
        return setup in other.reached and other._kernels == self._kernels and other._rates(setup) == self._rates(setup)

    def _rates(self, setup: TrainSetup) -> Rates | None:
        return rates_of(setup, self.cluster(setup.world_size // self.gpus_per_node), "cuda", self.goal.calibration)

    def bound(self, fewest: int, most: int) -> float:
        """Return tokens per second that one GPU does not exceed on so many nodes; 0 if its rates are not known.

        It is the speed of computation alone, with the micro-batches that make the global batch on the fewest.
        """
        levels: dict[tuple[Checkpointing, str | None], list[Setting]] = {}
        for setting in self._simulated.settings:  # none before selective before full: each computes more
            levels.setdefault((setting.checkpointing, setting.checkpointing_policy), []).append(setting)
        for level in levels.values():
            if self._anything_of(level, self.cluster(most)):
                return max(bound for bound, _ in self._classes(self.cluster(fewest), level))
        return 0.0

    def _anything_of(self, among: Sequence[Setting], cluster: Hardware) -> bool:
        """Return whether the live bytes of some of these settings fit, with the smallest micro-batch."""
        smallest = [(one, batches[0]) for one in among if (batches := self._batches(one, cluster.num_nodes))]
        sharded = [pair for pair in smallest if pair[0].strategy is ShardingStrategy.FULL_SHARD]
        least = sharded or smallest  # sharded, a setting takes the least memory; the Trainer does not on one GPU
        return any(self._may_fit(one, batch, cluster) for one, batch in least)

    def anything_fits(self, num_nodes: int) -> bool:
        """Return whether the live bytes of some setting fit so many servers."""
        return self._anything_of(sorted(self._simulated.settings, key=_saves, reverse=True), self.cluster(num_nodes))

    def smallest_that_fits(self, num_nodes: int) -> Prediction | None:
        """Return a setting that fits so many servers by the allocator's simulation, with the smallest micro-batch."""
        cluster = self.cluster(num_nodes)
        for setting in sorted(self._simulated.settings, key=_saves, reverse=True):
            for batch in self._batches(setting, num_nodes)[:1]:
                setup = self._setup(setting, batch, num_nodes)
                assert setup is not None
                if not self._may_fit(setting, batch, cluster) or not can_run(self.goal, setup):
                    continue
                goal = self.goal
                asked = Question(
                    goal.model, setup, cluster, profile=goal.calibration, headroom_bytes=goal.headroom_bytes
                )
                for segments in (False, True):
                    if found := answer_if_it_fits(asked.on_same_steps(expandable_segments=segments)):
                        return found
        return None

    def unknown(self, num_nodes: int) -> str:
        """Return what keeps the speed on so many servers from being known, as text."""
        server = self.server
        needed = {"GPUs": (self.gpus_per_node > 1, server.intra_node), "nodes": (num_nodes > 1, server.inter_node)}
        for what, (is_needed, link) in needed.items():
            if is_needed and (link is None or link.bandwidth_bytes_per_second is None):
                return f"nothing says how fast its {what} are connected"
        setup = self.example(num_nodes)
        assert setup is not None
        names = speed(self.steps(setup), self.cluster(num_nodes), self.goal.calibration).time.unknown
        return f"nobody documents what {names[0]} takes on it" if names else "no datasheet has its rates"

    def example(self, num_nodes: int) -> TrainSetup | None:
        """Return a setup on so many servers, whether or not it fits; None if there is none with the global batch."""
        for setting in self._simulated.settings:
            for batch in micro_batches(self.goal):
                if (setup := self._setup(setting, batch, num_nodes)) is not None:
                    return setup
        return None

    def refuse(self, timed: Timed) -> None:
        """Leave a setting out on so many nodes."""
        self.refused.add((setting_of(timed.setup), timed.setup.micro_batch_size, timed.cluster.num_nodes))

    def learn(self, reached: dict[TrainSetup, Reached], refused: set[tuple[Setting, int, int]]) -> None:
        """Take over what was timed and refused elsewhere."""
        self.reached |= reached
        for setup, one in reached.items():
            if one.work_seconds is not None:
                self._alike.setdefault((setting_of(setup), setup.micro_batch_size), {})[one.num_nodes] = setup
        self.refused |= refused

    def _candidates(self, cluster: Hardware, among: Iterable[Setting]) -> list[tuple[float, TrainSetup]]:
        """Return the setups that may fit, each with the speed of its computation alone, the fastest first."""
        found = []
        for setting in among:
            for batch in self._largest(setting, cluster):
                setup = self._setup(setting, batch, cluster.num_nodes)
                if setup is not None and can_run(self.goal, setup) and self._host_fits(setup, cluster):
                    found.append((self._simulated.without_communication(self._most, setting, batch), setup))
        return sorted(found, key=lambda pair: -pair[0])

    def _largest(self, setting: Setting, cluster: Hardware) -> list[int]:
        """Return the two largest micro-batches that may fit."""
        batches = self._batches(setting, cluster.num_nodes)
        for index in reversed(range(len(batches))):
            if self._may_fit(setting, batches[index], cluster):
                two = batches[max(index - 1, 0) : index + 1]
                return [one for one in two if (setting, one, cluster.num_nodes) not in self.refused]
        return []

    def _batches_of(self, setting: Setting, num_nodes: int) -> list[int]:
        """Return the micro-batches that make the global batch."""
        return [one for one in micro_batches(self.goal) if self._setup(setting, one, num_nodes) is not None]

    def _communication_alone(self, setup: TrainSetup) -> float:
        """Return the tokens per second of one GPU if nothing but the collectives took time."""
        seconds = for_all_micro_batches(setup, self._collective_seconds)
        return setup.tokens_per_step_per_rank / seconds if seconds else inf

    def _collective_seconds(self, setup: TrainSetup) -> float | None:
        """Return the time of a step's collectives: those of one group run one by one, those of others beside them."""
        sent, times = self._each_collective(setup)
        by_group: dict[str, float] = {}
        for work, count, seconds in zip(sent.different, sent.counts, times, strict=True):
            if seconds is None:
                return None
            by_group[work.group] = by_group.get(work.group, 0.0) + seconds * count
        return max(by_group.values(), default=0.0)

    def _setup(self, setting: Setting, batch: int, num_nodes: int) -> TrainSetup | None:
        return self._simulated.setup(setting, batch, num_nodes, self.gpus_per_node)

    def _may_fit(self, setting: Setting, batch: int, cluster: Hardware) -> bool:
        key = setting, batch, cluster.num_nodes
        if key in self.refused:
            return False
        if key not in self._live_fits:
            self._live_fits[key] = self._fits_by_live_bytes(setting, batch, cluster)
        return self._live_fits[key]

    def _fits_by_live_bytes(self, setting: Setting, batch: int, cluster: Hardware) -> bool:
        setup = self._setup(setting, batch, cluster.num_nodes)
        assert setup is not None
        groups = setting.strategy, setting.api, cluster.num_nodes  # of what settings differ in, these decide them
        if groups not in self._available_bytes:
            communicators = communicators_for(self.goal.model, setup, cluster)
            usable = available_bytes(self.gpu, communicators, self.goal.headroom_bytes) or 0
            self._available_bytes[groups] = int(usable / self._times)
        available = self._available_bytes[groups]
        live = self._simulated.live_bytes(self._kernels, self.gpus_per_node, setting, batch)
        if setup.is_bare:  # without what DDP adds on more GPUs
            return live.at(cluster.world_size) <= available
        if self._simulated.exceeds(available, self._kernels, self.gpus_per_node, setting, batch):
            return False
        return live.may_fit(cluster.world_size, available)

    def _host_fits(self, setup: TrainSetup, cluster: Hardware) -> bool:
        if setup.offload is Offload.NONE:
            return True
        limit = cluster.server.host_memory_bytes
        needed = host_memory(self.steps(setup), cluster.gpus_per_node, Build.META).peak_bytes
        return limit is not None and needed <= limit
