"""The simulations for a goal, shared by all kinds of servers: live bytes, collectives, and the time of steps."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import msgspec

from fsdp_bench.plan.purchase.goal import Goal, Setting, can_run, settings, setup_of
from fsdp_bench.plan.speed import step_seconds
from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.replay.live_memory import worst_rank
from fsdp_bench.replay.traffic import collectives
from fsdp_bench.simulate.events import Kind, Work
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, ShardingStrategy, TrainSetup, Wrap

_STEPS = "gradient_accumulation_steps"
NEVER = 2**62
"""More bytes than any GPU has."""
_ROUNDING = 0.99
"""A peak grows with the micro-batch on a line or above, but for the rounding of sizes: far less than a hundredth."""


LiveKey = tuple[Kernels, int, Setting, int]
"""Kernels, GPUs of a node, setting and micro-batch."""


class Sent(NamedTuple):
    """The collectives of a step."""

    different: tuple[Work, ...]
    counts: tuple[int, ...]
    """The number of times that each different one is issued."""
    order: tuple[int, ...]
    """The index of each among the different ones, in the order of issue."""


class Learned(NamedTuple):
    """The results of simulations, to be sent between processes."""

    live: dict[LiveKey, dict[int, int]]
    """Live bytes by the number of ranks."""
    computation: dict[tuple[str, Setting, int], float]
    sent: dict[tuple[Kernels, TrainSetup], Sent]


class LiveBytes:
    """The peak of live bytes of one setting and micro-batch, by the number of ranks.

    A rank holds less, the more ranks it is sharded over. So what fits some ranks fits more, and
    only the numbers between two powers of two of which one fits are simulated themselves.
    """

    def __init__(self, simulate: Callable[[int], int], smallest: int, largest: int) -> None:
        """Take a function that simulates a number of ranks, and the smallest and largest numbers that are asked for."""
        self._simulate = simulate
        self._smallest, self._largest = smallest, largest
        self.known: dict[int, int] = {}
        """The live bytes that were simulated, by the number of ranks."""

    def at(self, ranks: int) -> int:
        """Return the live bytes on so many ranks."""
        if ranks not in self.known:
            self.known[ranks] = self._simulate(ranks)
        return self.known[ranks]

    @property
    def least(self) -> int:
        """The live bytes on the most ranks."""
        return self.at(self._largest)

    def may_fit(self, ranks: int, available_bytes: int) -> bool:
        """Return whether the live bytes on so many ranks are within a GPU's available memory."""
        if self.least > available_bytes:
            return False
        below = self._smallest
        if self.at(below) <= available_bytes:
            return True
        while 2 * below <= ranks:
            below *= 2
        if below > self._smallest and self.at(below) <= available_bytes:
            return True
        if (above := 2 * below) < self._largest and self.at(above) > available_bytes:
            return False
        return self.at(ranks) <= available_bytes


class Simulated:
    """The simulations for a goal, shared by all kinds of servers: live bytes, and the speed of computation alone."""

    def __init__(self, goal: Goal, most_nodes: int) -> None:
        self.goal, self.most_nodes, self.settings = goal, most_nodes, settings(goal)
        self._live: dict[LiveKey, LiveBytes] = {}
        self.computation: dict[tuple[str, Setting, int], float] = {}
        """The speed of computation alone, by GPU, setting and micro-batch."""
        self.sent: dict[tuple[Kernels, TrainSetup], Sent] = {}
        """The collectives of steps, by kernels and ``sending_alike(setup)``."""
        self.steps = lru_cache(maxsize=512)(lambda setup, kernels: SimulatedSteps(goal.model, setup, kernels))
        """The steps of a setup on some kernels. One setup is asked for on many servers."""
        self.setup = cache(partial(setup_of, goal))
        """A setting, micro-batch, number of nodes and GPUs of each as a setup (``setup_of``)."""

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
                return worst_rank(self.steps(setup, kernels).for_memory)[1].peak_bytes

            self._live[key] = LiveBytes(simulate, fewest, most)
        return self._live[key]

    def learned(self) -> Learned:
        """Return what was simulated, for ``learn`` in another process."""
        return Learned({key: live.known for key, live in self._live.items()}, self.computation, self.sent)

    def learn(self, learned: Learned) -> None:
        """Take over what another process has simulated."""
        for key, known in learned.live.items():
            self.live_bytes(*key).known.update(known)
        self.computation.update(learned.computation)
        self.sent.update(learned.sent)

    def exceeds(self, num_bytes: int, kernels: Kernels, gpus_per_node: int, setting: Setting, batch: int) -> bool:
        """Return whether a setting takes more on the most servers, by one sequence, and by the line through it and two.

        A peak is a maximum of sums of which each grows evenly with the micro-batch, so it lies on that line or above.
        """
        one = self.live_bytes(kernels, gpus_per_node, setting, 1).least
        if batch == 1 or _ROUNDING * one > num_bytes:
            return one > num_bytes
        two = self.live_bytes(kernels, gpus_per_node, setting, 2).least
        return two > num_bytes if batch == 2 else int(_ROUNDING * (one + (batch - 1) * (two - one))) > num_bytes

    def collectives(self, kernels: Kernels, setup: TrainSetup) -> Sent:
        """Return the collectives of a step, of what ``sending_alike`` returns."""
        key = kernels, setup
        if key not in self.sent:
            issued = collectives(self.steps(setup, kernels).step())
            counts = Counter(issued)
            index = {work: number for number, work in enumerate(counts)}
            self.sent[key] = Sent(tuple(counts), tuple(counts.values()), tuple(index[work] for work in issued))
        return self.sent[key]

    def work_seconds(self, kernels: Kernels, setup: TrainSetup, rates: Rates) -> float:
        """Return the time of all work of a step of one micro-batch but its collectives, one by one."""
        log, known, total = self.steps(setup, kernels).step(), dict[tuple[Kind, Work], float](), 0.0
        ask = {Kind.KERNEL: rates.run, Kind.COPY: rates.copy, Kind.HOST_WORK: rates.host}
        for part in log.parts:
            for event in log.events[max(part.begin, log.steps[-1].start) : part.end]:
                if event.work is not None and event.kind in ask:
                    key = event.kind, event.work
                    if key not in known:
                        known[key] = ask[event.kind](event.work) or 0.0
                    total += log.times(part) * known[key]
        return total

    def without_communication(self, most: Hardware, setting: Setting, batch: int) -> float:
        """Return the most tokens per second of one GPU if collectives took no time, under any strategy.

        FSDP1's FULL_SHARD on the most servers computes least: it copies nothing that it gathers, and no rank's part of
        the optimizer's step is smaller. With frozen parameters others may: see ``_least_computing``.
        """
        alike = computation_of(setting)
        key = most.gpu.name, alike, batch
        if key not in self.computation:
            goal = replace(self.goal, global_batch_tokens=None)
            setup = setup_of(goal, alike, batch, most.num_nodes, most.gpus_per_node)
            assert setup is not None
            self.computation[key] = max((self._alone(one, most) for one in _least_computing(goal, setup)), default=0.0)
        return self.computation[key]

    def step_seconds(self, setup: TrainSetup, cluster: Hardware, without_communication: bool = False) -> float | None:
        """Return the time of a step."""
        kernels, calibration = kernels_on(CUDA, cluster.gpu), self.goal.calibration
        return for_all_micro_batches(
            setup, lambda few: step_seconds(self.steps(few, kernels), cluster, without_communication, calibration)
        )

    def _alone(self, setup: TrainSetup, most: Hardware) -> float:
        """Return the tokens per second of one GPU under one strategy, if collectives took no time."""
        seconds = self.step_seconds(setup, most, without_communication=True)
        if self.goal.global_batch_tokens is not None and seconds is not None:
            twice = msgspec.structs.replace(setup, gradient_accumulation_steps=2)
            both = self.step_seconds(twice, most, without_communication=True)
            seconds = (both or 0.0) - seconds  # at best the optimizer's time does not count
        return setup.micro_batch_size * setup.sequence_length / seconds if seconds else 0.0


def sending_alike(setup: TrainSetup) -> TrainSetup:
    """Return the setup that stands for all with its collectives, whatever they checkpoint, their loss and batch."""
    return msgspec.structs.replace(
        setup, micro_batch_size=1, checkpointing=Checkpointing.NONE, checkpointing_policy=None, loss=Loss.PLAIN
    )


def computation_of(setting: Setting) -> Setting:
    """Return the setting that stands for all that compute the same, under whatever wrapper."""
    return setting._replace(strategy=ShardingStrategy.FULL_SHARD, api=Api.FSDP1)


def _least_computing(goal: Goal, setup: TrainSetup) -> list[TrainSetup]:
    """Return the setups of which one computes least; of frozen parameters there are several.

    FSDP1 does not flatten frozen weights in bf16 with adapters in fp32. Adapters in units of their own cost the host
    time for each: on fast GPUs fsdp2, or DistributedDataParallel, which has no such units, takes less.
    """
    if not goal.model.has_frozen_parameters:
        return [setup]
    others: list[dict[str, Any]] = [
        {"wrap": Wrap.BLOCK_AND_ADAPTERS},
        {"api": Api.FSDP2, "strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"api": Api.FSDP2, "strategy": ShardingStrategy.NO_SHARD},
    ]
    return [
        one for one in (setup, *(msgspec.structs.replace(setup, **other) for other in others)) if can_run(goal, one)
    ]


def for_all_micro_batches(setup: TrainSetup, seconds_of: Callable[[TrainSetup], float | None]) -> float | None:
    """Return the seconds of all micro-batches of a step. Beyond the third each takes as long as the third."""
    count = setup.gradient_accumulation_steps
    few = [setup] if count <= 3 else [msgspec.structs.replace(setup, gradient_accumulation_steps=n) for n in (2, 3)]
    times = [seconds_of(one) for one in few]
    if None in times:
        return None
    known = [time for time in times if time is not None]
    return known[-1] + (count - len(known) - 1) * (known[-1] - known[0]) if len(known) > 1 else known[0]
