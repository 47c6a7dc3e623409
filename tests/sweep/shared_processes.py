"""Processes for all sweeps of a worker's tests, because importing torch takes longer than most trials.

Sweeps that run in the tests' process (``run_command``) use them. Sweeps in their own process start their own, and so do
the tests of ForkServer itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from fsdp_bench.spec.subprocesses.dry_run import CodeToBuild
from fsdp_bench.spec.subprocesses.model_code import DescriptionAnswer
from fsdp_bench.sweep.config import models
from fsdp_bench.sweep.launchers.one_node import ForkedTrial, ForkServer
from fsdp_bench.sweep.run import runner
from tests.conftest import TERMINAL
from tests.processes import children_of
from tests.train.ranks import FORK_SERVER


def _surroundings() -> tuple[str, dict[str, str]]:
    """Return the working directory and the environment, which a child process inherits."""
    return os.getcwd(), {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


class SharedForkServer(ForkServer):
    """Replaces ForkServer in a sweep, and keeps the process that forks ranks when the sweep has ended.

    Each trial still has newly forked ranks, and processes that they leave are ended after it. A sweep starts its own
    process if its environment or folder differs from the usual one, or if another sweep uses the shared process.
    """

    _shared: ForkServer | None = None
    _user: SharedForkServer | None = None
    _folder: Path
    _usual: tuple[str, dict[str, str]]
    _starter = ThreadPoolExecutor(max_workers=1)
    """The thread that starts the process, which ends with it (PR_SET_PDEATHSIG)."""

    _trial: ForkedTrial | None = None
    _is_between_trials = True

    def start(self, trial: Path, scratch: Path, world_size: int) -> ForkedTrial:
        self._is_between_trials = False
        launched = super().start(trial, scratch, world_size)
        assert isinstance(launched, ForkedTrial)
        self._is_between_trials, self._trial = True, launched
        return launched

    def _spawn(self) -> None:
        cls = type(self)
        if self._environment or _surroundings() != cls._usual or cls._user not in (None, self):
            super()._spawn()
            return
        if cls._shared is None or cls._shared._process is None or cls._shared._process.poll() is not None:
            cls.end()
            cls._shared = ForkServer(cls._folder / "server.log", str(cls._folder))
            cls._starter.submit(cls._shared._spawn).result()
        cls._user, self._process, self._mark, self._buffer = self, cls._shared._process, cls._shared._mark, b""

    def close(self) -> None:
        """Leave the process to the next sweep, or end it together with a trial that has not ended."""
        cls = type(self)
        if cls._user is not self:
            super().close()
            return
        has_ended = self._trial is None or self._trial.finished
        if self._is_between_trials and has_ended and self._process is not None:
            runner.end_marked(self._mark, [self._process.pid])
            self._process = None
        else:
            super().close()
            cls._shared = None
        cls._user = None

    @classmethod
    @contextmanager
    def instead_of_own(cls, folder: Path) -> Iterator[None]:
        """Let sweeps in the tests' process use the shared server, whose log is in ``folder``."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in TERMINAL.items():
                patch.setenv(name, value)
            cls._usual, cls._folder = _surroundings(), folder
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "ForkServer", cls)
            yield

    @classmethod
    def ranks(cls) -> list[psutil.Process]:
        """Return the ranks of the running trial."""
        process = None if cls._shared is None else cls._shared._process
        return [] if process is None else children_of(process)

    @classmethod
    def end(cls) -> None:
        if cls._shared is not None:
            cls._shared.close()
            cls._shared = None


def _describe(specs: list[CodeToBuild], pipe: Connection) -> None:
    """Answer as ``python -m fsdp_bench.train.models.describe`` does."""
    import warnings

    from fsdp_bench.train.models.describe import answer

    warnings.simplefilter("ignore")
    pipe.send([answer(spec) for spec in specs])


def describe_in_fork(specs: list[CodeToBuild]) -> list[DescriptionAnswer]:
    """Replace ``fsdp_bench.sweep.config.models._ask``: answer in a fork of a process that has imported torch."""
    ours, theirs = FORK_SERVER.Pipe(duplex=False)
    with ours:
        process = FORK_SERVER.Process(target=_describe, args=(specs, theirs))
        process.start()
        theirs.close()
        answers: list[DescriptionAnswer] = ours.recv()
        process.join()
    return answers


@contextmanager
def descriptions_in_forks() -> Iterator[None]:
    """Let models' code be described in forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_ask", describe_in_fork)
        yield
