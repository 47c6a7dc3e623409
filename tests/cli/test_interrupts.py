"""Interrupts at any moment, and readers that close the pipe."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_bench.cli.common.interrupts import INTERRUPTED, raised_once
from tests.processes import listens_for_interrupts


@pytest.fixture(autouse=True)
def hear_interrupts() -> Iterator[None]:
    """A shell's background jobs, and so their tests, start with SIGINT ignored; nohup ignores SIGHUP."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class InterruptedInItsFinalizer:
    number: int = signal.SIGINT

    def __del__(self) -> None:
        signal.raise_signal(self.number)


def drop_and_wait() -> None:
    InterruptedInItsFinalizer()
    time.sleep(10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_in_a_finalizer_is_not_swallowed(number: int) -> None:
    InterruptedInItsFinalizer.number = number
    with raised_once(), pytest.raises(KeyboardInterrupt):
        drop_and_wait()


def test_a_second_interrupt_does_not_disturb_the_cleaning_up() -> None:
    cleaned = False
    with raised_once():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            cleaned = True
    assert cleaned


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], sys.unraisablehook
    with raised_once():
        pass
    assert ([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], sys.unraisablehook) == before


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_an_interrupt_while_the_command_is_imported_is_one_line(delay: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_bench", "models"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not listens_for_interrupts(process.pid):
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate()
    if process.returncode == 0:
        assert text == ""  # it was faster
    else:
        assert (process.returncode, text.strip()) == (130, f"fsdp-bench: {INTERRUPTED}")


PRINTING = """
import sys
from fsdp_bench.cli.common.interrupts import forgiving_streams

@forgiving_streams(OSError, ValueError)
def work():
    for _ in range(3000):
        print("a line on standard output")
        print("a line on standard error", file=sys.stderr)
    open("done", "w")
    return 3

sys.exit(work())
"""


@pytest.mark.parametrize("where", ["a closed pipe", "a full disk"])
def test_a_sweep_goes_on_and_tells_the_truth_where_nobody_reads_what_it_prints(tmp_path: Path, where: str) -> None:
    if where == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    done = subprocess.run([sys.executable, "-c", PRINTING], stdout=output, stderr=output, cwd=tmp_path)
    os.close(output)
    assert done.returncode == 3
    assert (tmp_path / "done").exists()


def test_an_interrupt_inside_of_executed_text_leaves_the_exit_code_alone(tmp_path: Path) -> None:
    """Modules are imported and dataclasses made by ``exec``; an interrupt may come then, too."""
    program = """
from fsdp_bench.cli.common import interrupts
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    pass
interrupts.ignore()
raise SystemExit(130)
"""
    (tmp_path / "program.py").write_text(program)
    assert subprocess.run([sys.executable, "-m", "program"], cwd=tmp_path).returncode == 130
