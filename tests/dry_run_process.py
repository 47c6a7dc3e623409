"""One process for the dry runs of all tests of a worker, because importing torch takes longer than most dry runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunSpec
from fsdp_bench.sweep import dry_run

OwnProcess = dry_run._Process


def _start() -> OwnProcess:
    """Start a process with one thread: several, which wait at tiny operators, take ten times the CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return OwnProcess()


class SharedDryRuns:
    """Replaces ``fsdp_bench.sweep.dry_run._Process``.

    A user's code runs in its own process, as it does outside of tests: it may change global state, and two tests may
    use the same name for their modules. Modules of tests/ share the process.
    """

    _shared: OwnProcess | None = None
    _lock = threading.Lock()
    _starter = ThreadPoolExecutor(max_workers=1)
    """The thread that starts the process, which ends with it (PR_SET_PDEATHSIG): a command's threads end too early."""

    def __init__(self) -> None:
        self._own: OwnProcess | None = None
        self._ended: OwnProcess | None = None

    def ask(self, spec: DryRunSpec) -> DryRunAnswer | None:
        if spec.model is None and not (spec.module and spec.module.function.startswith("tests.")):
            self._own = self._own or OwnProcess()
            return self._own.ask(spec)
        with self._lock:
            process = SharedDryRuns._shared = SharedDryRuns._shared or self._starter.submit(_start).result()
            answer = process.ask(spec)
            if answer is None:
                self._ended, SharedDryRuns._shared = process, None
            return answer

    def describe_end(self) -> str:
        ended = self._ended or self._own
        assert ended is not None
        return ended.describe_end()

    def kill(self) -> None:
        if self._own is not None:
            self._own.kill()

    def close(self) -> None:
        for process in (self._own, self._ended):
            if process is not None:
                process.close()

    @classmethod
    @contextmanager
    def instead_of_own(cls) -> Iterator[None]:
        """Let dry runs use the shared process, and end it on exit."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry_run, "_Process", cls)
            yield
        if cls._shared is not None:
            cls._shared.close()
            cls._shared = None
