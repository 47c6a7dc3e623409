"""rehearse_command(): one rank of a real training command, or several in turn, and whether it fits."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import msgspec

from fsdp_bench.catalog.loader import BUILT_IN, Catalog
from fsdp_bench.catalog.lookup import find_placement
from fsdp_bench.plan.defaults import USUAL_GPUS_PER_NODE
from fsdp_bench.plan.headroom import Headroom, sized, stated_headroom
from fsdp_bench.plan.random_data import read_random_data
from fsdp_bench.plan.rehearsal import Rehearsal, headroom_of_script, rehearsed_gpu, together
from fsdp_bench.rates.scaled import read_scaling
from fsdp_bench.rehearse.command import Command, RankStarter, read_command
from fsdp_bench.rehearse.prepared import PreparedPython
from fsdp_bench.rehearse.run import rehearse
from fsdp_bench.spec.calibration_profile import Scaling
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.hardware import Gpu, Hardware, Server
from fsdp_bench.spec.setup import ShardingStrategy
from fsdp_bench.spec.subprocesses.rehearsal import (
    RehearsalOptions,
    RehearsalOutcome,
    RehearsalReport,
    RehearsedGpu,
    ScriptFailure,
)
from fsdp_bench.spec.units import parse_bytes

DEFAULT_STEPS = 4
"""Optimizer steps at most: the first, the second, in which the optimizer has its states, and two like it. One
is enough if it repeats the second in every allocation (inside/observe/memory.py, History.repeats)."""

STAGES = "stages"
"""The value of --ranks for rank 0 and all with which it exchanges messages, directly or not."""


@dataclass(frozen=True)
class CommandToRehearse:
    """A command, its hardware, and the ranks to run; everything is checked."""

    command: Command
    hardware: Hardware
    ranks: tuple[int, ...]
    options: RehearsalOptions
    headroom_bytes: int | None
    max_gpu_bytes: int | None
    tokens_per_step: int | None = None
    scaling: Scaling | None = None
    timeout_seconds: float | None = None
    with_stages: bool = False
    """Whether the ranks are run, too, with which those exchange messages: pipeline stages."""

    @cached_property
    def kept_free(self) -> Headroom:
        """GPU memory that is kept free for the CUDA context and NCCL."""
        world_size = self.options.world_size or self.options.gpus_per_node
        return headroom_of_script(self.hardware, world_size, self.headroom_bytes)

    @property
    def stand_in(self) -> RehearsedGpu:
        """The GPU for the stand-in to pass for."""
        return rehearsed_gpu(self.hardware.gpu, self.kept_free.num_bytes)

    def answer(self, report: RehearsalReport) -> Rehearsal:
        """Return what a rank's report says of its hardware."""
        kept, asks_time = self.kept_free, self.options.notes_work
        return Rehearsal(report, self.hardware, kept, self.max_gpu_bytes, asks_time, self.tokens_per_step, self.scaling)

    def answers(self, begin: Callable[[int], None] = lambda rank: None) -> Iterator[Rehearsal]:
        """Run the ranks in turn; yield what is found of each, also of one that is interrupted.

        ``begin`` is called with each rank before it runs; ``together`` (plan/rehearsal.py) then finds their time.

        Raises:
            KeyboardInterrupt: at an interrupt, once what was found until then is yielded.
            MachineError: if the command's Python has no CUDA build of torch, or the stand-in cannot be compiled.
            SpecError: if its launcher refuses its arguments.
            RehearsalError: if its process ends without a report.
        """
        ranks = RanksToRun(self)
        with ExitStack() as stack:
            prepared: PreparedPython | None = None
            while (rank := ranks.next()) is not None:
                if prepared is None and (len(self.ranks) > 1 or ranks.num_run > 1):
                    prepared = stack.enter_context(PreparedPython())
                begin(rank)
                options = ranks.options(rank)
                report = rehearse(self.command, self.stand_in, rank, options, self.timeout_seconds, prepared)
                for done in ranks.add(report):
                    yield self.answer(done)
                if report.outcome is RehearsalOutcome.INTERRUPTED:
                    raise KeyboardInterrupt


class RanksToRun:
    """The ranks still to be run. One that needs an unknown message has ended, and runs again once it is known."""

    def __init__(self, asked: CommandToRehearse) -> None:
        self._asked = asked
        self._todo = list(reversed(asked.ranks))
        self._seen = set(self._todo)
        self._running: set[int] = set()
        self._waiting: dict[int, RehearsalReport] = {}
        self._sent: dict[str, Mapping[str, tuple[str, ...]]] = {}
        """Messages, by the rank that sends and the one that receives."""
        self._given: dict[int, dict[str, tuple[str, ...]]] = {}
        self.num_run = 0
        """Runs that were begun."""

    @property
    def is_done(self) -> bool:
        """Whether all have run to their end."""
        return not self._todo and not self._running and not self._waiting

    def next(self) -> int | None:
        """Return a rank to be run; None if none can be before another one has ended, or all are done."""
        ready = next(reversed(self._todo), None)
        if ready is None:
            ready = next((rank for rank in self._waiting if self._can_go_on(rank)), None)
        if ready is not None:
            self._todo = [rank for rank in self._todo if rank != ready]
            self._waiting.pop(ready, None)
            self._running.add(ready)
            self.num_run += 1
        return ready

    def options(self, rank: int) -> RehearsalOptions:
        """Return the options for a rank, with the messages that it receives."""
        self._given[rank] = {
            sender: texts for sender, sent in self._sent.items() if (texts := sent.get(str(rank))) is not None
        }
        return msgspec.structs.replace(self._asked.options, messages=self._given[rank])

    def add(self, report: RehearsalReport) -> list[RehearsalReport]:
        """Take a rank's report; return the reports that are now final."""
        rank = report.rank
        self._running.discard(rank)
        self._sent[str(rank)] = report.sent
        wanted = set(report.peers) if self._asked.with_stages else set[int]()
        if report.waits_for is not None:
            self._waiting[rank] = report
            wanted.add(report.waits_for)
        self._todo += sorted(wanted - self._seen, reverse=True)
        self._seen |= wanted
        ended = [report] if report.waits_for is None else []
        return ended + self._stuck()

    def _can_go_on(self, rank: int) -> bool:
        """Whether the rank that one waits for has sent more since."""
        sender = str(self._waiting[rank].waits_for)
        return self._sent.get(sender, {}).get(str(rank), ()) != self._given[rank].get(sender, ())

    def _stuck(self) -> list[RehearsalReport]:
        """Return the reports of ranks that wait for what is never sent, if nothing else can be run."""
        if self._todo or self._running or any(map(self._can_go_on, self._waiting)):
            return []
        stuck, self._waiting = list(self._waiting.values()), {}
        return [_that_waits(report) for report in stuck]


def _that_waits(report: RehearsalReport) -> RehearsalReport:
    failure = ScriptFailure(
        type="RuntimeError",
        message=f"rank {report.rank} waits for a message of rank {report.waits_for}, which ended without sending it",
        line=None,
        user_line=None,
        traceback="",
    )
    return msgspec.structs.replace(report, outcome=RehearsalOutcome.FAILED, failure=failure)


def command_to_rehearse(
    command: str | Sequence[str],
    server: str | Server | None = None,
    gpu: str | Gpu | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    world_size: int | None = None,
    gpu_memory: str | int | None = None,
    headroom: str | int | None = None,
    steps: int | str | None = None,
    ranks: str | int | Sequence[int] = 0,
    max_gpu_memory: str | int | None = None,
    snapshot: Path | None = None,
    random_weights: bool = False,
    random_data: str | bool | None = None,
    balanced_routing: bool = False,
    stops_at_unsupported: bool = True,
    time: bool = False,
    tokens_per_step: int | None = None,
    calibration: Path | str | None = None,
    timeout: float | None = None,
    strategy: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    edited: Mapping[str, str] = MappingProxyType({}),
    catalog: Catalog = BUILT_IN,
) -> CommandToRehearse:
    """Check what is asked for, as ``rehearse_command`` takes it, before anything runs.

    ``environment`` has variables, and ``edited`` texts of files by absolute paths, that the command finds. Raises
    SpecError for values that are not allowed.
    """
    _check_values(snapshot, time, tokens_per_step, calibration, timeout)
    words = shlex.split(command) if isinstance(command, str) else list(command)
    words = [*(f"{name}={value}" for name, value in environment.items()), *words]
    understood = read_command(words, os.environ, Path.cwd())
    if strategy is not None and understood.launcher is not RankStarter.ACCELERATE:
        raise SpecError(
            "strategy: only accelerate launch has a switch for it; write {strategy} where the command says it, and"
            " --each strategy=.. with the script's own words"
        )
    place = find_placement(gpu, server, nodes, gpus_per_node, world_size, catalog)
    hardware = sized(place.hardware, gpu_memory, None)
    is_counted = any(given is not None for given in (server, nodes, gpus_per_node, world_size))
    world = place.world_size if is_counted else None
    alone = understood.launcher is RankStarter.NONE
    each = place.gpus_per_node if is_counted else 1 if alone else USUAL_GPUS_PER_NODE
    if world is not None and server is None and gpus_per_node is None:
        each = min(USUAL_GPUS_PER_NODE, world)
    rehearsed_gpu(hardware.gpu, 0)  # or it is refused
    scaling = None if calibration is None else read_scaling(Path(calibration), hardware.gpu)
    with_stages = isinstance(ranks, str) and ranks.strip().lower() == STAGES
    chosen_ranks = _ranks(0 if with_stages else ranks, world)
    if snapshot is not None and (len(chosen_ranks) > 1 or with_stages):
        raise SpecError("snapshot: one file for several ranks; choose one with --rank")
    return CommandToRehearse(
        command=understood,
        hardware=hardware,
        ranks=chosen_ranks,
        options=RehearsalOptions(
            world_size=world,
            gpus_per_node=each,
            steps=_steps(DEFAULT_STEPS if steps is None else steps, least=2 if time else 1),
            ends_early=steps is None,
            snapshot=None if snapshot is None else str(snapshot.resolve()),
            random_weights=random_weights,
            random_data=read_random_data(random_data, catalog),
            balanced_routing=balanced_routing,
            stops_at_unsupported=stops_at_unsupported,
            notes_work=time,
            strategy=None if strategy is None else ShardingStrategy(strategy).value,
            edited=dict(edited),
        ),
        headroom_bytes=stated_headroom(headroom, hardware),
        max_gpu_bytes=None if max_gpu_memory is None else parse_bytes(max_gpu_memory, "max-gpu-memory"),
        tokens_per_step=tokens_per_step,
        scaling=scaling,
        timeout_seconds=timeout,
        with_stages=with_stages,
    )


def _check_values(
    snapshot: Path | None,
    time: bool,
    tokens_per_step: int | None,
    calibration: Path | str | None,
    timeout: float | None,
) -> None:
    """Raise SpecError for a value that no rehearsal takes, before the command is read."""
    if snapshot is not None and not snapshot.resolve().parent.is_dir():
        raise SpecError(f"snapshot: {str(snapshot.parent)!r} is no folder")
    for name, of_time in (("tokens-per-step", tokens_per_step), ("calibration", calibration)):
        if of_time is not None and not time:
            raise SpecError(f"{name}: it counts for --time alone, which is not given")
    if tokens_per_step is not None and tokens_per_step < 1:
        raise SpecError(f"tokens-per-step: {shown(tokens_per_step)} is not allowed; a whole number, 1 or more")
    if timeout is not None and not 0 < timeout < float("inf"):
        raise SpecError(f"timeout: {shown(timeout)} is not allowed; a number of seconds above 0")


def rehearse_command(command: str | Sequence[str], **asked: object) -> list[Rehearsal]:
    """Run one rank of a training command without a GPU: ``rehearse_command("torchrun train.py", gpu="H100-SXM")``.

    PyTorch's CUDA build of the command's Python runs on a stand-in for NVIDIA's libraries, in a process of its own.

    Args:
        command: what would be started on the cluster: python, torchrun or accelerate launch, and its arguments.
        asked: the options of ``fsdp-bench rehearse`` by name, with underscores: ``server``, ``gpu``, ``nodes``,
            ``gpus_per_node``, ``world_size``, ``gpu_memory``, ``headroom``, ``steps`` (by default 4, or 3 if the third
            repeats the second; or "all"), ``ranks`` (0, a list, "all", or "stages": 0 and one rank of each other
            pipeline stage), ``max_gpu_memory``, ``snapshot``, ``random_weights``, ``random_data`` (True, or as
            in ``--random-data``), ``balanced_routing``,
            ``stops_at_unsupported``, ``time``, ``tokens_per_step``, ``calibration``, ``timeout`` in seconds,
            ``strategy``.

    Returns:
        A Rehearsal for each rank: ``report`` has peaks by step and phase in bytes, ``verdict`` whether it fits, and
        ``time``, if that was asked for, how long a step takes.

    Raises:
        SpecError: for values that are not allowed.
        MachineError: if the command's Python has no CUDA build of torch, or there is no C compiler.
        RehearsalError: if the command's process ends without a report. One that ``timeout`` ends reports what was seen
            until then, with the outcome ``timed_out``, unless its main thread cannot be interrupted.
    """
    return together(list(command_to_rehearse(command, **asked).answers()))  # type: ignore[arg-type]


def _steps(steps: int | str, least: int) -> int | None:
    text = str(steps).strip().lower()
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < least:
        why = " with --time, as the first step is no steady one" if least > 1 and text == "1" else ""
        raise SpecError(f"steps: {shown(steps)} is not allowed{why}; a whole number, {least} or more, or all")
    return int(text)


def _ranks(ranks: str | int | Sequence[int], world_size: int | None) -> tuple[int, ...]:
    if isinstance(ranks, str) and ranks.strip().lower() == "all":
        if world_size is None:
            raise SpecError("ranks: all needs --world-size or --server")
        return tuple(range(world_size))
    words = [ranks] if isinstance(ranks, int) else ranks.split(",") if isinstance(ranks, str) else ranks
    for word in words:
        if not str(word).strip().isdecimal() or (world_size is not None and int(word) >= world_size):
            allowed = f"0 to {world_size - 1}, by the world size" if world_size else "whole numbers from 0"
            allowed += f", all, or {STAGES}"
            raise SpecError(f"ranks: {shown(word)} is not allowed; {allowed}")
    return tuple(dict.fromkeys(map(int, words)))
