"""A pytest plugin that prints CPU seconds, by folder and of the heaviest tests, and checks them by tests/budgets.toml.

A test's CPU time includes that of all processes below its own, because most tests start some. CPU time depends on the
machine, and little on other load. Therefore each run also times a small loop of Python, and the rows of
tests/budgets.toml are multiplied by the ratio of that time to the file's ``loop_seconds``.

The setup of a session's fixture is counted apart: the test that asks for it first differs from worker to worker.
"""

import contextlib
import os
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
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
TRIES = 20
"""Readings of the processes' times before only those that have ended count."""


def tree_cpu_seconds() -> float:
    """Return the CPU time of this process, of its ended children and of all living processes below it, in seconds."""
    own = psutil.Process()
    for _ in range(TRIES):
        with contextlib.suppress(psutil.Error):  # one has ended meanwhile, whose time its parent has now
            return sum(sum(process.cpu_times()[:4]) for process in (own, *own.children(recursive=True)))
    return sum(own.cpu_times()[:4])


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

    def excesses(self, seconds: Mapping[str, float], loop: float) -> Iterator[str]:
        """Yield a line for each folder and each test that takes more than the margin allows.

        Args:
            seconds: CPU seconds of each test, and of what is no test.
            loop: seconds of the loop in this run.
        """
        scale = MARGIN * loop / self.loop
        for folder, taken in sorted(by_folder(seconds).items()):
            if (allowed := self.folders.get(folder, 0.0) * scale) < taken:
                yield f"{folder}: {taken:.0f} CPU seconds, at most {allowed:.0f} allowed"
        for test, taken in _of_tests(seconds).items():
            if (allowed := self.longer_tests.get(test, self.each_test) * scale) < taken:
                yield f"{folder_of(test)}: {test} took {taken:.1f} CPU seconds, at most {allowed:.1f} allowed"


def folder_of(name: str) -> str:
    """Return a test's folder in tests/ or tests/on_stand_in/; of a file outside of these and of no test, the name."""
    parts = name.partition("::")[0].removeprefix("tests/").split("/")
    return "/".join(parts[: 2 if parts[0] == "on_stand_in" else 1])


def by_folder(seconds: Mapping[str, float]) -> dict[str, float]:
    folders: dict[str, float] = defaultdict(float)
    for name, taken in seconds.items():
        folders[folder_of(name)] += taken
    return dict(folders)


def _of_tests(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: taken for name, taken in seconds.items() if "::" in name}


class Meter:
    """Measures in each process that runs tests. A test's last report has the seconds since the one before it."""

    def __init__(self) -> None:
        self._what = COLLECTION
        self._seconds: dict[str, float] = defaultdict(float)
        self._read = 0.0
        self._looped = -LOOP_EVERY_SECONDS

    def _switch(self, what: str) -> None:
        """Count the seconds until now, and those from now on as those of something else.

        The sum falls when a process ends that nobody waits for, such as chromium's: its seconds were counted before.
        """
        before, self._read = self._read, tree_cpu_seconds()
        self._seconds[self._what] += max(self._read - before, 0.0)
        self._what = what

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        what = self._what
        if fixturedef.scope == "session":
            self._switch(FIXTURES)
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                self._switch(what)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._switch(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            self._switch(COLLECTION)
            report.cpu_seconds, self._seconds = dict(self._seconds), defaultdict(float)
            if time.monotonic() - self._looped > LOOP_EVERY_SECONDS:
                report.loop_seconds, self._looped = loop_seconds(), time.monotonic()
            self._read = tree_cpu_seconds()
        return report


class Total:
    """Adds up the seconds of all processes, prints them, and fails a run that exceeds its budget."""

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget
        self._seconds: dict[str, float] = defaultdict(float)
        self._loops: list[float] = []
        self._begin = time.monotonic()
        self._excesses: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for what, seconds in getattr(report, "cpu_seconds", {}).items():
            self._seconds[what] += seconds
        if (loop := getattr(report, "loop_seconds", None)) is not None:
            self._loops.append(loop)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._budget is not None and self._loops:
            self._excesses = list(self._budget.excesses(self._seconds, statistics.median(self._loops)))
            if self._excesses and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._loops:
            return
        write, loop = terminalreporter.write_line, statistics.median(self._loops)
        terminalreporter.section("CPU seconds")
        for folder, taken in sorted(by_folder(self._seconds).items(), key=lambda row: -row[1]):
            row = f" of {self._budget.folders.get(folder, 0) * loop / self._budget.loop:7.1f}" if self._budget else ""
            write(f"{taken:8.1f}{row}  {folder}")
        total, wall = sum(self._seconds.values()), time.monotonic() - self._begin
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        write(f"{total:8.1f}  in all, {wall:.0f} s on the clock; load {load}; the loop took {loop:.3f} s")
        terminalreporter.section("the tests that take most CPU seconds")
        tests = _of_tests(self._seconds)
        for test, taken in sorted(tests.items(), key=lambda row: -row[1])[:HEAVIEST]:
            write(f"{taken:8.1f}  {test}")
        if self._excesses:
            terminalreporter.section(f"more than {MARGIN} times the budget of {BUDGETS}", red=True)
            for excess in self._excesses:
                write(excess)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", metavar="TABLE", help="fail if a folder takes more than a table of tests/budgets.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each process that runs tests; add up in the process that prints."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter(), "cpu meter")
    if not is_worker:
        budget = None
        if name := config.getoption("budget"):
            document = tomllib.loads((config.rootpath / BUDGETS).read_text())
            budget = Budget(document["loop_seconds"], **document[name])
        config.pluginmanager.register(Total(budget), "cpu total")
