"""The process that a rehearsal starts: its environment, and what is said if it leaves no report."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from fsdp_bench.rehearse import run
from fsdp_bench.rehearse.command import Command, RankStarter
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOptions, RehearsalOutcome, RehearsalPlan, RehearsalReport
from tests.rehearse.conftest import gpu_of
from tests.report.test_rehearsal_text import REPORT

GPU = gpu_of(8.9)


@pytest.fixture(autouse=True)
def _a_stand_in_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "find_torch", lambda python: None)
    monkeypatch.setattr(run, "build_stand_in", lambda torch, otherwise: tmp_path)


def rehearsed(environment: dict[str, str], timeout_seconds: float | None = None) -> RehearsalReport:
    command = Command(Path(sys.executable), (), RankStarter.NONE, ("-c", "pass"), environment)
    return run.rehearse(command, GPU, 0, RehearsalOptions(world_size=1, gpus_per_node=1), timeout_seconds)


def started(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], code: int) -> tuple[dict[str, str], str]:
    """Return the environment of a command's process that ends with a code, and the error."""
    seen: list[dict[str, str]] = []

    def instead(_words: list[str], environment: dict[str, str], _timeout_seconds: float | None) -> tuple[int, None]:
        seen.append(environment)
        return code, None

    monkeypatch.setattr(run, "_run", instead)
    with pytest.raises(run.RehearsalError) as failed:
        rehearsed(environment)
    return seen[0], str(failed.value)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_LIBRARY_PATH"])
def test_libraries_that_the_command_itself_names_are_kept(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``LD_PRELOAD=libjemalloc.so python train.py``: the stand-in goes before it."""
    found, _ = started(monkeypatch, {name: "theirs"}, 1)
    assert found[name].startswith(str(tmp_path))
    assert found[name].endswith(":theirs")


def test_a_process_that_linux_killed_says_what_may_have_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _, killed = started(monkeypatch, {}, -signal.SIGKILL)
    assert "by signal 9" in killed
    assert "host memory" in killed
    _, ended = started(monkeypatch, {}, 1)
    assert "host memory" not in ended


def test_what_a_script_leaves_running_ends_with_it(tmp_path: Path) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, file=open(sys.argv[1], 'w'))"
    assert run._run([sys.executable, "-c", script, str(tmp_path / "pid")], dict(os.environ), None) == (0, None)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(30)


def test_a_script_that_takes_longer_than_its_timeout_is_ended() -> None:
    _, cut = run._run([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), 0.2)
    assert cut is RehearsalOutcome.TIMED_OUT


@pytest.mark.parametrize("cut", [RehearsalOutcome.TIMED_OUT, RehearsalOutcome.INTERRUPTED])
def test_what_was_seen_is_kept_of_a_script_that_is_ended(
    monkeypatch: pytest.MonkeyPatch, cut: RehearsalOutcome
) -> None:
    def instead(words: list[str], *_others: object) -> tuple[int, RehearsalOutcome]:
        report = from_json(Path(words[-1]).read_bytes(), RehearsalPlan).report
        Path(report).write_bytes(to_json(replace(REPORT, outcome=RehearsalOutcome.INTERRUPTED)))
        return 0, cut

    monkeypatch.setattr(run, "_run", instead)
    report = rehearsed({}, 1.0)
    assert (report.outcome, report.spans) == (cut, REPORT.spans)
