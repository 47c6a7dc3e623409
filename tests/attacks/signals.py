"""Sends random signals to the processes of running sweeps, and resumes the sweeps until they are done.

Under every launcher, to the manager, the fork server or torchrun, one rank, a process group, or all of them. After each
run of the command: no record lost, changed or repeated, no trial failed without a cause, no traceback, no exit code but
0, 1, 2, 3, 130 and the signals that it was sent, no process left; after each completed sweep no file left.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import read_record

MARK = "FSDP_BENCH_ATTACK"
SECONDS_TO_END = 20.0
RUN_SECONDS = 400.0
"""A run of the command that takes longer hangs."""

_HEAD = """
[run]
device = "cpu"
steps = {steps}
communication_steps = 0
timeout_seconds = 60
threads_per_rank = 1
{run}
[models.tiny]
family = "llama"
num_hidden_layers = 2
hidden_size = 128
num_attention_heads = 2
intermediate_size = 256
vocab_size = 128
{frontier}
[grid]
model = "tiny"
sequence_length = 16
"""
_FRONTIER = '[frontier]\ndial = "num_hidden_layers"\nlargest = 32\n'
_BOTH = 'api = ["fsdp1", "fsdp2"]\n'

SWEEPS = {
    "fork": _HEAD.format(run="steps_without_communication = 0", frontier="", steps=3)
    + f"world_size = 2\nseed = {list(range(2))}\n{_BOTH}",
    "torchrun": _HEAD.format(run='launcher = "torchrun"\nsteps_without_communication = 0', frontier="", steps=3)
    + f"world_size = 2\n{_BOTH}",
    "frontier": _HEAD.format(run='memory_limit = "6MiB"', frontier=_FRONTIER, steps=1) + f"world_size = 2\n{_BOTH}",
}

DEADLY = ("SIGKILL", "SIGABRT", "SIGSEGV", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGALRM", "SIGBUS", "SIGHUP")
_REAL_TIME = signal.SIGRTMIN + 6
_ALLOWED_CODES = (0, 1, 2, 3, 130)
_KEPT = {
    "trials",
    "machine.json",
    "sweep.toml",
    "trials.csv",
    "progress.json",
    ".lock",
    "frontier.json",
    "frontier.csv",
}
_NOT_STARTED = ("did not start", "no process can be started")


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that have a mark in their environment, whosoever children they are by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Return a process's children; psutil looks at every process of the machine for that."""
    found = []
    with contextlib.suppress(OSError, psutil.Error):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            found += [psutil.Process(int(word)) for word in (task / "children").read_text().split()]
    return found


def listens_for_interrupts(pid: int) -> bool:
    """Whether the command handles SIGTERM; before that Python is starting, and nothing of the package runs."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return bool(caught) and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def _start_as_a_terminal_does() -> None:
    """A shell's background jobs, and so their tests, start with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """One run of the command, and what was done to it."""

    def __init__(self, words: list[str], environment: dict[str, str], output: Path) -> None:
        self.output = output
        self.attacks: list[str] = []
        self.sent: set[int] = set()
        """Signals that the manager was sent."""
        self.hurt_ranks = False
        self._stopped: list[psutil.Process] = []
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
                preexec_fn=_start_as_a_terminal_does,
            )
        self.manager = psutil.Process(self.process.pid)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def children(self) -> list[psutil.Process]:
        return children_of(self.manager)

    def ranks(self) -> list[psutil.Process]:
        return [rank for child in self.children() for rank in children_of(child)]

    def wait_for_a_moment(self, draw: random.Random) -> None:
        """Wait for the command's first second, or for the ranks of a trial and a part of what it takes."""
        if not self.attacks and draw.random() < 0.25:
            time.sleep(draw.uniform(0.0, 1.0))
            return
        deadline = time.monotonic() + 30
        while self.is_running and not self.ranks() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 0.7))

    def send(self, process: psutil.Process, number: int) -> None:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            process.send_signal(number)
            if number == signal.SIGSTOP:
                self._stopped.append(process)

    def go_on(self) -> None:
        """Continue what was stopped."""
        while self._stopped:
            self.send(self._stopped.pop(), signal.SIGCONT)

    def interrupt(self, number: int) -> None:
        while self.is_running and not listens_for_interrupts(self.process.pid):
            time.sleep(0.005)
        self.sent.add(number)
        self.send(self.manager, number)

    def output_text(self) -> str:
        return self.output.read_text(errors="replace")


def attack_manager(run: Run, draw: random.Random) -> str:
    """Interrupt it once or twice, end it, or stop it for a while."""
    kind = draw.choice(("interrupt", "interrupt", "interrupt twice", "end", "stop"))
    if kind == "stop":
        run.send(run.manager, signal.SIGSTOP)
        time.sleep(draw.uniform(0.1, 3.0))
        run.go_on()
        return "stop manager"
    if kind == "end":
        number = draw.choice([*(int(signal.Signals[name]) for name in DEADLY), _REAL_TIME])
        run.interrupt(number)  # once it handles signals, so that what it does is its own
        return f"manager {number}"
    number = draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    run.interrupt(number)
    if kind == "interrupt twice":
        time.sleep(draw.uniform(0.0, 0.4))
        run.interrupt(draw.choice((signal.SIGINT, signal.SIGTERM)))
    return f"{kind} {number}"


def attack_child(run: Run, draw: random.Random) -> str:
    """The fork server, or torchrun."""
    return _attack_one(run, run.children(), draw, "server")


def attack_rank(run: Run, draw: random.Random) -> str:
    return _attack_one(run, run.ranks(), draw, "rank")


def _attack_one(run: Run, processes: list[psutil.Process], draw: random.Random, name: str) -> str:
    if not processes:
        return f"no {name}"
    run.hurt_ranks = True
    process = draw.choice(processes)
    if draw.random() < 0.25:
        run.send(process, signal.SIGSTOP)
        if draw.random() < 0.1:
            return f"stop {name} for good"
        time.sleep(draw.uniform(0.1, 2.0))
        run.go_on()
        return f"stop {name}"
    number = draw.choice([*(int(signal.Signals[word]) for word in DEADLY), signal.SIGINT, _REAL_TIME])
    run.send(process, number)
    return f"{name} {number}"


def attack_group(run: Run, draw: random.Random) -> str:
    """A process group: the ranks', or the server's, or the manager's, as a terminal does."""
    group = draw.choice([run.manager, *run.children(), *run.ranks()])
    number = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    run.hurt_ranks = True
    if group == run.manager:
        run.interrupt(number)
        return f"manager's group {number}"
    with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
        pgid = os.getpgid(group.pid)
        if pgid not in (os.getpgid(0), os.getpgid(run.process.pid)):
            os.killpg(pgid, number)
    return f"group {number}"


def attack_everything(run: Run, draw: random.Random) -> str:
    run.hurt_ranks = True
    run.sent.add(signal.SIGKILL)
    everything = [run.manager, *run.children(), *run.ranks()]
    draw.shuffle(everything)
    for process in everything:
        run.send(process, signal.SIGKILL)
    return "everything 9"


ATTACKS: tuple[Callable[[Run, random.Random], str], ...] = (
    attack_manager, attack_manager, attack_manager, attack_child, attack_rank, attack_rank, attack_group,
    attack_everything,
)  # fmt: skip


class Campaign:
    """One sweep under one launcher, run again and again while it is attacked."""

    def __init__(self, name: str, home: Path, draw: random.Random) -> None:
        self.name, self._home, self._draw = name, home, draw
        self._mark = uuid.uuid4().hex
        home.mkdir(parents=True)
        (home / "tmp").mkdir()
        (home / f"{name}.toml").write_text(SWEEPS[name])
        self.folder = home / "results" / "here" / name
        self._words = [sys.executable, "-m", "fsdp_bench", "sweep", str(home / f"{name}.toml"), "--no-charts"]
        self._words += ["--results", str(home / "results"), "--machine", "here"]
        self._environment = {**os.environ, MARK: self._mark, "TMPDIR": str(home / "tmp")}
        self._finished: Counter[str] = Counter()
        self._is_hurt = False
        self._log: list[str] = []
        self.num_attacks = 0

    def records(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in (self.folder / "trials").glob("*.json")}

    def run(self, most_attacks: int) -> Iterator[str]:
        """Run the command once, with up to so many attacks; yield what must not be."""
        before = self.records()
        run = Run(self._words, self._environment, self._home / "output")
        for _ in range(most_attacks):
            run.wait_for_a_moment(self._draw)
            if not run.is_running:
                break
            run.attacks.append(self._draw.choice(ATTACKS)(run, self._draw))
            self.num_attacks += 1
        self._log.append(f"{self.name}: {run.attacks}")
        hangs = False
        try:
            code = run.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            hangs, code = True, 0
            run.process.kill()
            run.process.wait()
        if hangs:
            yield "the command hangs"
        yield from self._check(run, code, before)

    def _check(self, run: Run, code: int, before: dict[str, bytes]) -> Iterator[str]:
        text = run.output_text()
        self._is_hurt |= run.hurt_ranks
        if code not in _ALLOWED_CODES and -code not in run.sent:
            yield f"exit code {code}"
        if code == 130 and not run.sent:
            yield "interrupted by nobody"
        if code == 2 and not (run.hurt_ranks and any(words in text for words in _NOT_STARTED)):
            yield "exit code 2 without a cause"
        # A trial whose ranks were hurt says which of PyTorch's errors its other ranks met.
        ours = re.sub(r"^\[\d+/\d+\] .* crashed .*$", "", text, flags=re.MULTILINE) if self._is_hurt else text
        for word in ("Traceback", "Exception ignored", "Error:"):
            if word in ours:
                yield f"{word} in the output"
        after = self.records()
        if any(after.get(trial) != data for trial, data in before.items()):
            yield "a record was lost or changed"
        yield from self._check_new({trial: data for trial, data in after.items() if trial not in before})
        self._finished.update(re.findall(r"^\[\d+/\d+\] ([0-9a-f]{12}) ", text, re.MULTILINE))
        if any(count > 1 for count in self._finished.values()):
            yield "a trial ran again after it had finished"
        yield from self._check_processes()
        if code in (0, 1):
            yield from self._check_completed(code)

    def _check_new(self, records: dict[str, bytes]) -> Iterator[str]:
        for trial, data in records.items():
            try:
                record = read_record(data, trial)
            except msgspec.DecodeError as error:
                yield f"a record that cannot be read: {error}"
                continue
            if record.id != trial:
                yield "a record of another trial"
            is_budget = record.outcome is Outcome.OOM_HOST and "budget" in (record.reason or "")
            if record.outcome is not Outcome.OK and not is_budget and not self._is_hurt:
                yield f"a trial failed without a cause: {record.reason}"

    def _check_processes(self) -> Iterator[str]:
        deadline = time.monotonic() + SECONDS_TO_END
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(psutil.Error):
                yield f"a process was left: {process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
                process.kill()

    def _check_completed(self, code: int) -> Iterator[str]:
        """The sweep is done: nothing but results is there; go on with a fresh folder."""
        files = {path.name for path in self.folder.iterdir() if not path.match(".writer.*")} - _KEPT
        if files:
            yield f"files were left: {files}"
        if strays := [path.name for path in (self.folder / "trials").glob(".*")]:
            yield f"files were left in trials/: {strays}"
        outcomes = [read_record(data, "").outcome for data in self.records().values()]
        failed = any(outcome in (Outcome.CRASHED, Outcome.TIMEOUT) for outcome in outcomes)
        if code != failed and self.name != "frontier":
            yield f"exit code {code} with outcomes {[outcome.value for outcome in outcomes]}"
        shutil.rmtree(self._home / "results")
        self._finished.clear()
        self._is_hurt = False
        if strays := [name for name in os.listdir(self._home / "tmp") if not name.startswith("torchinductor_")]:
            yield f"files were left in TMPDIR: {strays}"

    def finish(self) -> Iterator[str]:
        """Run the command without an attack, to the sweep's end."""
        yield from self.run(0)
        if self.folder.exists():
            yield "the sweep did not complete"

    def story(self) -> str:
        return "\n".join(self._log[-4:]) + "\n" + (self._home / "output").read_text(errors="replace")[-2000:]


def attack(name: str, count: int, seed: int, home: Path) -> list[str]:
    """Attack a sweep until all attacks are made; return what must not be."""
    draw, failures = random.Random(seed), []
    campaign = Campaign(name, home / name, draw)
    while campaign.num_attacks < count:
        most = min(draw.choice((2, 4, 8, 16)), count - campaign.num_attacks)
        failures += [f"{problem}\n{campaign.story()}" for problem in campaign.run(most)]
    failures += [f"at the end: {problem}\n{campaign.story()}" for problem in campaign.finish()]
    return failures
