"""A pytest plugin that prints CPU seconds, by folder and of the heaviest tests, and checks them by tests/budgets.toml.

A test's CPU time includes that of all processes below its own, because most tests start some. CPU time depends on the
machine, and little on other load. Therefore each run also times a small loop of Python, and the rows of
tests/budgets.toml are multiplied by the ratio of that time to the file's ``loop_seconds``.

The setup of a session's fixture is counted apart: the test that asks for it first differs from worker to worker.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

BUDGETS = "tests/budgets.toml"
MARGIN = 1.5
"""The factor by which a folder or a test may exceed its budget. Beside other work, the same instructions take up to 1.3
times as many CPU seconds, because two threads share a core."""

COLLECTION, FIXTURES = "collection", "session fixtures"
HEAVIEST = 10
LOOP_EVERY_SECONDS = 20.0


def tree_cpu_seconds() -> float:
    """Return the CPU time of this process, of its ended children and of all living processes below it, in seconds."""
    own, seconds = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            seconds += sum(process.cpu_times()[:4])  # user, system, and both of its ended children
    return seconds


def loop_seconds() -> float:
    begin = time.thread_time()
    counts: dict[int, int] = {}
    for number in range(200_000):
        counts[number % 1000] = counts.get(number % 1000, 0) + len(str(number))
    return time.thread_time() - begin


@dataclass(frozen=True)
class Budget:
    """The CPU seconds that a run may take, where the loop takes ``loop`` seconds: one table of tests/budgets.toml."""

    loop: float
    folders: Mapping[str, float]
    each_test: float
    longer_tests: Mapping[str, float]

    def excesses(self, tests: Mapping[str, float], other: Mapping[str, float], loop: float) -> Iterator[str]:
        """Yield a line for each folder and each test that takes more than the margin allows.

        Args:
            tests: CPU seconds of each test.
            other: CPU seconds outside of tests, by purpose.
            loop: seconds of the loop in this run.
        """
        scale = MARGIN * loop / self.loop
        for folder, seconds in sorted({**by_folder(tests), **other}.items()):
            if (allowed := self.folders.get(folder, 0.0) * scale) < seconds:
                yield f"{folder}: {seconds:.0f} CPU seconds, at most {allowed:.0f} allowed"
        for test, seconds in tests.items():
            if (allowed := self.longer_tests.get(test, self.each_test) * scale) < seconds:
                yield f"{folder_of(test)}: {test} took {seconds:.1f} CPU seconds, at most {allowed:.1f} allowed"


def read_budget(file: Path, name: str) -> Budget:
    document = tomllib.loads(file.read_text())
    return Budget(document["loop_seconds"], **document[name])


def folder_of(test: str) -> str:
    """Return a test's folder in tests/ or tests/on_stand_in/; for a file outside of these, the file's name."""
    _, *parts = test.partition("::")[0].split("/")
    return "/".join(parts[: 2 if parts[0] == "on_stand_in" else 1])


def by_folder(tests: Mapping[str, float]) -> dict[str, float]:
    folders: dict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        folders[folder_of(test)] += seconds
    return dict(folders)


class Meter:
    """Measures the tests of one process: of a worker, or of pytest itself where there are none."""

    def __init__(self) -> None:
        self.loops = [loop_seconds()]
        self.other: dict[str, float] = defaultdict(float)
        self._looped = time.monotonic()
        self._read = tree_cpu_seconds()
        self._not_of_the_test = 0.0

    def _since(self) -> float:
        """Return the CPU seconds since the last call.

        The sum falls when a process ends that nobody waits for, such as chromium's: its seconds were counted before.
        """
        before, self._read = self._read, tree_cpu_seconds()
        return max(self._read - before, 0.0)

    def pytest_collection_finish(self) -> None:
        self.other[COLLECTION] += tree_cpu_seconds()
        self._since()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope != "session":
            return (yield)
        begin, inner = tree_cpu_seconds(), self._not_of_the_test
        try:
            return (yield)
        finally:
            seconds = tree_cpu_seconds() - begin - (self._not_of_the_test - inner)
            self.other[FIXTURES] += seconds
            self._not_of_the_test += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        if time.monotonic() - self._looped > LOOP_EVERY_SECONDS:
            self.loops.append(loop_seconds())
            self._looped = time.monotonic()
        self._since()
        self._not_of_the_test = 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.cpu_seconds = max(self._since() - self._not_of_the_test, 0.0)
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)  # of a worker of pytest-xdist
        if output is not None:
            output["cpu_time"] = {"other": dict(self.other), "loops": self.loops}


class Total:
    """Adds up the seconds of all processes, prints them, and fails a run that exceeds its budget."""

    def __init__(self, meter: Meter | None, budget: Budget | None, file: Path | None) -> None:
        self._meter, self._budget, self._file = meter, budget, file
        self._tests: dict[str, float] = defaultdict(float)
        self._other: dict[str, float] = defaultdict(float)
        self._loops: list[float] = []
        self._begin = time.monotonic()
        self._excesses: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (seconds := getattr(report, "cpu_seconds", None)) is not None:
            self._tests[report.nodeid] += seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if measured := getattr(node, "workeroutput", {}).get("cpu_time"):
            self._add(measured["other"], measured["loops"])

    def _add(self, other: Mapping[str, float], loops: list[float]) -> None:
        for what, seconds in other.items():
            self._other[what] += seconds
        self._loops += loops

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._meter is not None:
            self._add(self._meter.other, self._meter.loops)
        if self._budget is not None and self._loops:
            self._excesses = list(self._budget.excesses(self._tests, self._other, statistics.median(self._loops)))
            if self._excesses and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests or not self._loops:
            return
        write, loop = terminalreporter.write_line, statistics.median(self._loops)
        terminalreporter.section("CPU seconds")
        seconds = {**by_folder(self._tests), **self._other}
        for folder, taken in sorted(seconds.items(), key=lambda row: -row[1]):
            row = f" of {self._budget.folders.get(folder, 0) * loop / self._budget.loop:7.1f}" if self._budget else ""
            write(f"{taken:8.1f}{row}  {folder}")
        total, wall = sum(seconds.values()), time.monotonic() - self._begin
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        write(f"{total:8.1f}  in all, {wall:.0f} s on the clock; load {load}; the loop took {loop:.3f} s")
        terminalreporter.section("the tests that take most CPU seconds")
        for test, taken in sorted(self._tests.items(), key=lambda row: -row[1])[:HEAVIEST]:
            write(f"{taken:8.1f}  {test}")
        if self._excesses:
            terminalreporter.section(f"more than {MARGIN} times the budget of {BUDGETS}", red=True)
            for excess in self._excesses:
                write(excess)
        if path := self._file:
            path.write_text("".join(f"{seconds:.2f}\t{test}\n" for test, seconds in self._tests.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", metavar="TABLE", help="fail if a folder takes more than a table of tests/budgets.toml")
    parser.addoption("--cpu-times", metavar="FILE", type=Path, help="write the CPU seconds of each test, with tabs")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each process that runs tests; add up in the process that prints."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    meter = Meter() if runs_tests else None
    if meter is not None:
        config.pluginmanager.register(meter, "cpu meter")
    if not hasattr(config, "workerinput"):
        name = config.getoption("budget")
        budget = read_budget(config.rootpath / BUDGETS, name) if name else None
        config.pluginmanager.register(Total(meter, budget, config.getoption("cpu_times")), "cpu total")
