"""Rehearses variants of a command, each rank of each in a process of its own, several at once where memory allows."""

import os
import select
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Self

import psutil
from msgspec.structs import replace

from fsdp_bench.plan.rehearsal import Rehearsal, together, worst_of
from fsdp_bench.plan.rehearse_command import CommandToRehearse, RanksToRun
from fsdp_bench.plan.script.kept import KeptReports
from fsdp_bench.plan.script.variants import Variant
from fsdp_bench.rehearse.prepared import PreparedPython
from fsdp_bench.rehearse.run import RehearsalError, RunningRehearsal
from fsdp_bench.spec.errors import SpecError, printable
from fsdp_bench.spec.files import cgroup_limit_bytes
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOptions, RehearsalOutcome, RehearsalReport

SPARE = 1.25
"""Another rehearsal begins if so many times the most host memory that one has taken is free, also in a container."""

TAIL_BYTES = 4000
"""The end of a script's output that is looked at for its last line, if the script leaves no report."""


@dataclass(frozen=True)
class Answered:
    """A variant and what was found: its ranks' rehearsals, or the reason why there are none."""

    variant: Variant
    found: tuple[Rehearsal, ...]
    reason: str | None = None

    @property
    def worst(self) -> Rehearsal | None:
        """The rank that decides; None if there is none."""
        return worst_of(self.found) if self.found else None

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits without allocation retries; None if that is not known."""
        return None if self.worst is None else self.worst.fits

    @property
    def has_failed(self) -> bool:
        """Whether the script failed or was ended by --timeout, or nothing was rehearsed."""
        ends = {one.report.outcome for one in self.found}
        return self.reason is not None or bool(ends & {RehearsalOutcome.FAILED, RehearsalOutcome.TIMED_OUT})


class _Place:
    """A variant, and its ranks' rehearsals so far."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._ranks = None if variant.asked is None else RanksToRun(variant.asked)
        self._found: list[Rehearsal] = []
        self._reason: str | None = None

    @property
    def ranks(self) -> RanksToRun:
        """The ranks to be run of a variant that can be rehearsed."""
        assert self._ranks is not None
        return self._ranks

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is to be run any more."""
        return self._reason is not None or (self._ranks is not None and self._ranks.is_done)

    def next(self) -> int | None:
        """Return a rank to be run now."""
        return None if self.is_done else self.ranks.next()

    def take(self, result: RehearsalReport | str) -> None:
        """Take a rank's report, or why there is none."""
        if isinstance(result, str):
            self._reason = self._reason or result
        elif self._reason is None and self.variant.asked is not None:
            self._found += map(self.variant.asked.answer, self.ranks.add(result))

    def answer(self) -> Answered:
        """Return the answer."""
        return Answered(self.variant, tuple(together(self._found)), self._reason)


@dataclass
class _Job:
    """One rank of a variant."""

    place: _Place
    rank: int
    options: RehearsalOptions

    @property
    def asked(self) -> CommandToRehearse:
        """The variant's command and hardware."""
        assert self.place.variant.asked is not None
        return self.place.variant.asked


@dataclass
class _Running:
    """A job whose process runs."""

    job: _Job
    rehearsal: RunningRehearsal
    output: IO[bytes]
    deadline: float | None
    began: float
    """In seconds since the epoch."""


class Rehearsals:
    """Rehearses what one question asks for; ``with`` ends what still runs, and drops kept reports after success."""

    def __init__(self, kept: KeptReports, at_once: int | None = None) -> None:
        """``at_once``: the most that run at a time; by default as many as there are processors."""
        self._kept, self._at_once = kept, at_once or os.cpu_count() or 1
        self._running: list[_Running] = []
        self._prepared = PreparedPython()
        self._most_host_bytes: int | None = None
        self.num_run = 0
        """Processes that were started; kept reports need none."""

    def __enter__(self) -> Self:
        self._prepared.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with ExitStack() as ended:
            ended.push(self._prepared)
            for running in self._running:
                ended.callback(running.output.close)
                ended.push(running.rehearsal)
        self._running = []
        if kind is None:
            self._kept.forget()

    def answer(
        self, variants: Sequence[Variant], progress: Callable[[Answered], None] = lambda one: None
    ) -> list[Answered]:
        """Return the answer of each variant, in their order; ``progress`` is called with each.

        Raises SpecError if several would write one --snapshot, MachineError without a CUDA build of torch or a
        stand-in. At a KeyboardInterrupt what was found is kept.
        """
        if any(one.asked is not None and one.asked.options.snapshot is not None for one in variants):
            raise SpecError("snapshot: it is one file, of one rehearsal; rehearse the command by itself")
        places = [_Place(variant) for variant in variants]
        jobs = deque[_Job]()

        def found(place: _Place, result: RehearsalReport | str) -> None:
            was_done = place.is_done
            place.take(result)
            begin(place)
            if place.is_done and not was_done:
                progress(place.answer())

        def begin(place: _Place) -> None:
            while (rank := place.next()) is not None:
                job = _Job(place, rank, place.ranks.options(rank))
                known = self._kept.find(job.asked, rank)
                if known is None:
                    jobs.append(job)
                else:
                    found(place, known)

        for place in places:
            if place.variant.asked is None:
                found(place, place.variant.refused or "")
            else:
                begin(place)
        for job, result in self._run(jobs):
            found(job.place, result)
        return [place.answer() for place in places]

    def _run(self, jobs: deque[_Job]) -> Iterator[tuple[_Job, RehearsalReport | str]]:
        while jobs or self._running:
            while jobs and self._has_room():
                job = jobs.popleft()
                try:
                    self._start(job)
                except SpecError as error:
                    yield job, str(error)
            for running in self._ended():
                self._running.remove(running)
                with running.output, running.rehearsal:
                    yield running.job, self._result(running)

    def _has_room(self) -> bool:
        if not self._running:
            return True
        if len(self._running) >= self._at_once or self._most_host_bytes is None:
            return False
        each, limit = SPARE * self._most_host_bytes, cgroup_limit_bytes()
        is_in_limit = limit is None or each * (len(self._running) + 1) <= limit
        return is_in_limit and psutil.virtual_memory().available > each

    def _start(self, job: _Job) -> None:
        asked, began = job.asked, time.time()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rehearsal
        try:
            rehearsal = RunningRehearsal(
                asked.command, asked.stand_in, job.rank, job.options, output.fileno(), prepared=self._prepared
            )
        except BaseException:
            output.close()
            raise
        self.num_run += 1
        limit = asked.timeout_seconds
        deadline = None if limit is None else time.monotonic() + limit
        self._running.append(_Running(job, rehearsal, output, deadline, began))

    def _ended(self) -> list[_Running]:
        """Wait until one ends or its time is up; return those."""
        deadlines = [running.deadline for running in self._running if running.deadline is not None]
        seconds = max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None
        readable = select.select([running.rehearsal for running in self._running], [], [], seconds)[0]
        now = time.monotonic()
        late = [one for one in self._running if one.deadline is not None and one.deadline <= now]
        for running in late:
            if running.rehearsal not in readable:
                running.rehearsal.cut(RehearsalOutcome.TIMED_OUT, "was ended by --timeout")
        return [running for running in self._running if running.rehearsal in readable or running in late]

    def _result(self, running: _Running) -> RehearsalReport | str:
        job, asked = running.job, running.job.asked
        try:
            report = running.rehearsal.report()
        except SpecError as error:
            return str(error)
        except RehearsalError as error:
            return f"{error}: {_last_line(running.output)}"
        if report.outcome is RehearsalOutcome.INTERRUPTED:
            raise KeyboardInterrupt
        if report.failure is not None and report.failure.type == "SystemExit":  # whose message is the exit code
            report = replace(report, failure=replace(report.failure, message=_last_line(running.output)))
        self._most_host_bytes = max(self._most_host_bytes or 0, report.peak_host_bytes)
        if report.waits_for is None:
            self._kept.keep(asked, job.rank, report, running.began)
        return report


def _last_line(output: IO[bytes]) -> str:
    output.seek(max(output.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
    lines = [line.strip() for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return printable(lines[-1]) if lines else "it printed nothing"
