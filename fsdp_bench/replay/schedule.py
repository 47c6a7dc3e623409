"""When everything of a step runs: the host issues, streams run in order, a group's collectives come one by one.

An operator starts when the host has issued it and its stream is free; a collective also when the one that its group
was given before has ended, because a communicator runs one at a time. On a CPU the host does the work itself, what
gloo copies and adds as well: a collective that runs beside operators takes their cores from them.
What is exposed is the time in which a collective runs and no operator does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.events import Stream
from fsdp_bench.simulate.issued import Action, Do, Timeline, Work
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.repeat import REPEATED_BLOCK, SIMULATED_BLOCKS
from fsdp_bench.simulate.step import Simulation
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.setup import Api, ShardingStrategy, TrainSetup

Spans = list[tuple[float, float]]
"""Begin and end in seconds, in order."""


@dataclass(frozen=True)
class Span:
    """When one action ran."""

    kind: str
    """``compute``, ``collective``, ``copy`` or ``host``."""
    stream: Stream
    begin: float
    end: float
    work: Work
    phase: str
    block: int
    """Of the simulation; -1 outside of blocks."""


@dataclass(frozen=True)
class StepTime:
    """One step of one rank, in seconds. None where what it rests on is not known."""

    step_seconds: float | None
    compute_seconds: float | None
    """In which an operator runs."""
    communication_seconds: float | None
    """In which a collective runs."""
    exposed_communication_seconds: float | None
    host_copy_seconds: float | None
    """In which something is copied to or from the host."""
    unknown: tuple[str, ...] = ()
    """Whose time nobody knows."""
    cpu_optimizer_seconds: float = 0.0
    """The optimizer's step in host memory, under offload: the GPU has nothing to do meanwhile."""
    spans: tuple[Span, ...] = ()
    """Where they were asked for."""


def step_time(
    shape: ModelShape, setup: TrainSetup, kernels: Kernels, rates: Rates, with_spans: bool = False
) -> StepTime:
    """Return when a step ends, in the steady state, and what was exposed.

    Raises:
        SpecError: for models that cannot be predicted.
    """
    actions = issued(shape, setup, kernels)
    return replay(actions, rates, with_spans)


def issued(shape: ModelShape, setup: TrainSetup, kernels: Kernels) -> Iterable[Action]:
    """Return what the host issues in one step: the parts of a middle block as often as the model has such blocks."""
    extra = shape.num_hidden_layers - SIMULATED_BLOCKS
    has_buckets = setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.NO_SHARD  # DDP's cut across blocks
    if extra > 0 and not has_buckets:
        recorded = _recorded(shape, setup, kernels, SIMULATED_BLOCKS)
        if recorded is not None:
            return repeated(recorded, extra)
    recorded = _recorded(shape, setup, kernels, shape.num_hidden_layers)
    assert recorded is not None  # all blocks are there
    return repeated(recorded, 0)


@lru_cache(maxsize=4)
def _recorded(shape: ModelShape, setup: TrainSetup, kernels: Kernels, num_blocks: int) -> tuple[Action, ...] | None:
    timeline = Timeline()
    simulation = Simulation(shape, setup, kernels, num_blocks, timeline)
    if num_blocks < shape.num_hidden_layers and not simulation.is_stretchable:
        return None
    simulation.load()
    simulation.warm_up()
    timeline.actions.clear()
    simulation.step()
    if setup.world_size == 1:  # a group of one has nothing to send
        return tuple(action for action in timeline.actions if action.do not in (Do.SEND, Do.START))
    return tuple(timeline.actions)


def repeated(actions: Sequence[Action], extra_blocks: int) -> list[Action]:
    """Write repetitions out: of micro-batches, and of a middle block's parts."""
    done: list[Action] = []
    micro_batch: list[Action] = []
    times = 1
    for part in _parts(actions):
        if part[0].do is Do.REPEAT:
            done += micro_batch * times
            micro_batch, times = [], part[0].block
            continue
        is_middle = part[0].do is Do.MARK and part[0].block == REPEATED_BLOCK
        micro_batch += part * (1 + extra_blocks) if is_middle else part
    return done + micro_batch * times


def _parts(actions: Sequence[Action]) -> list[list[Action]]:
    parts: list[list[Action]] = [[]]
    for action in actions:
        if action.do is Do.MARK or action.do is Do.REPEAT:
            parts.append([])
        parts[-1].append(action)
        if action.do is Do.REPEAT:
            parts.append([])
    return [part for part in parts if part]


class _Clock:
    """The host, the streams and the communicators of one rank."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.host = 0.0
        self.streams = [0.0] * len(Stream)
        self.groups: dict[str, float] = {}
        self.events: dict[str, deque[float]] = {}
        self.started = 0.0
        """When the last of the collectives that nobody waited for ends."""

    def issue(self, action: Action, seconds: float) -> float:
        """Let an operator, a copy or a collective run as soon as it can; return when it begins."""
        self.host += self.rates.launch_seconds
        begin = max(self.host, self.streams[action.stream])
        work = action.work
        assert work is not None
        if work.group:
            begin = max(begin, self.groups.get(work.group, 0.0))
            self.groups[work.group] = begin + seconds
        end = begin + seconds
        if action.do is Do.START and not self.rates.blocks_host:
            self.started = max(self.started, end)
            return begin
        self.streams[action.stream] = end
        if self.rates.blocks_host:
            self.host = end
        return begin

    def wait(self, action: Action) -> None:
        """Follow the actions that only order others."""
        do, stream, streams = action.do, action.stream, self.streams
        if do is Do.WAIT:
            streams[stream] = max(streams[stream], streams[action.other])
        elif do is Do.RECORD:
            self.events.setdefault(action.name, deque()).append(streams[stream])
        elif do is Do.WAIT_EVENT:
            streams[stream] = max(streams[stream], self.events[action.name].popleft())
        elif do is Do.HOST_WAIT:
            self.host = max(self.host, self.events[action.name].popleft())
        elif do is Do.SYNCHRONIZE:
            self.host = max(self.host, streams[stream])
        elif do is Do.FINISH:
            streams[stream] = max(streams[stream], self.started)

    @property
    def now(self) -> float:
        """When the host and all streams are done."""
        return max(self.host, self.started, *self.streams)


KIND = {Do.RUN: "compute", Do.SEND: "collective", Do.START: "collective", Do.COPY: "copy", Do.HOST: "host"}


def replay(actions: Iterable[Action], rates: Rates, with_spans: bool = False) -> StepTime:
    """Run a step's actions."""
    clock, memo, unknown = _Clock(rates), _Memo(rates), dict[str, None]()
    intervals: dict[str, Spans] = {"compute": [], "collective": [], "copy": [], "host": []}
    spans: list[Span] = []
    phase, block, cpu_optimizer = "", -1, 0.0
    for action in actions:
        work = action.work
        if work is None:
            clock.wait(action)
            if action.do is Do.MARK:
                phase, block = action.name, action.block
            continue
        seconds = memo.seconds(action.do, work)
        if seconds is None:
            unknown[work.name if not work.group else f"{work.name} ({work.group})"] = None
            seconds = 0.0
        if action.do is Do.HOST:
            begin = clock.host
            clock.host += seconds
            cpu_optimizer += seconds if work.name.startswith("optimizer") else 0.0
        else:
            begin = clock.issue(action, seconds)
        kind = KIND[action.do]
        intervals[kind].append((begin, begin + seconds))
        if with_spans:
            spans.append(Span(kind, action.stream, begin, begin + seconds, work, phase, block))
    return _summary(clock.now, intervals, tuple(unknown), tuple(spans), cpu_optimizer)


class _Memo:
    """What each piece of work takes, asked once."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._known: dict[tuple[Do, Work], float | None] = {}

    def seconds(self, do: Do, work: Work) -> float | None:
        key = (do, work)
        if key not in self._known:
            ask = {Do.RUN: self._rates.run, Do.COPY: self._rates.copy, Do.HOST: self._rates.host}
            self._known[key] = ask.get(do, self._rates.send)(work)
        return self._known[key]


def _summary(
    end: float,
    intervals: dict[str, Spans],
    unknown: tuple[str, ...],
    spans: tuple[Span, ...],
    cpu_optimizer_seconds: float,
) -> StepTime:
    compute, collectives = union(intervals["compute"]), union(intervals["collective"])
    copies_are_known = not any(name in unknown for name in ("to_device", "to_host"))
    collectives_are_known = not any("(" in name for name in unknown)
    is_known = not unknown
    compute_is_known = all("(" in name or name in ("to_device", "to_host") for name in unknown)
    return StepTime(
        step_seconds=end if is_known else None,
        compute_seconds=length(compute) if compute_is_known else None,
        communication_seconds=length(collectives) if collectives_are_known else None,
        exposed_communication_seconds=length(collectives) - overlap(collectives, compute) if is_known else None,
        host_copy_seconds=length(union(intervals["copy"])) if copies_are_known else None,
        unknown=unknown,
        cpu_optimizer_seconds=cpu_optimizer_seconds,
        spans=spans,
    )


def union(spans: Spans) -> Spans:
    """Return spans without overlap, in order."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: Spans) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def overlap(one: Spans, other: Spans) -> float:
    """Return the seconds that two lists of such spans share."""
    shared, index = 0.0, 0
    for begin, end in one:
        while index < len(other) and other[index][1] <= begin:
            index += 1
        position = index
        while position < len(other) and other[position][0] < end:
            shared += min(end, other[position][1]) - max(begin, other[position][0])
            position += 1
    return shared
