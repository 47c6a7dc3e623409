"""One process for the dry runs of all tests of a worker, because importing torch takes longer than most dry runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunSpec
from fsdp_bench.sweep import dry_run


class OneThread(dry_run._Worker):
    """Its process has one thread: several, which wait at tiny operators, take ten times the CPU time."""

    def _started(self) -> subprocess.Popen[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            return super()._started()


class SharedDryRuns(dry_run._Worker):
    """Replaces ``fsdp_bench.sweep.dry_run._Worker``.

    A user's code runs in its own process, as it does outside of tests: it may change global state, and two tests may
    use the same name for their modules. Modules of tests/ share the process.
    """

    _shared = OneThread()
    _thread = ThreadPoolExecutor(max_workers=1)
    """The thread that starts the process, which ends with it (PR_SET_PDEATHSIG): a command's threads end too early."""

    def answer(self, spec: DryRunSpec) -> DryRunAnswer:
        if spec.model is None and not (spec.module and spec.module.function.startswith("tests.")):
            return super().answer(spec)
        return self._thread.submit(self._shared.answer, spec).result()

    @classmethod
    @contextmanager
    def instead_of_own(cls) -> Iterator[None]:
        """Let dry runs use the shared process, and end it on exit."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry_run, "_Worker", cls)
            yield
        cls._shared.close()
