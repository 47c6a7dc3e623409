"""Random signals to the processes of running sweeps, which are resumed until they are done.

Under every launcher, to the manager, the fork server or torchrun, one rank, a process group, or all of them. After each
run of the command: no record lost, changed or repeated, no trial failed without a cause, no traceback, no exit code but
0, 1, 2, 3, 130 and the signals that it was sent, no process left; after each completed sweep no file left.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import read_record
from tests.attacks import count_and_seed
from tests.conftest import write_tiny_sweep
from tests.processes import Sweep, children_of, listens_for_interrupts, processes_with, ranks_of, wait_until

COUNT, SEED = count_and_seed(2, 10)
MARK = "FSDP_BENCH_ATTACK"
SECONDS_TO_END = 20.0
RUN_SECONDS = 400.0
"""A run of the command that takes longer hangs."""

GRID = 'world_size = 2\napi = ["fsdp1", "fsdp2"]\n'
RUN = "timeout_seconds = 60\nsteps = 3"
SWEEPS = {
    "fork": (GRID + "seed = [0, 1]", RUN),
    "torchrun": (GRID, f'{RUN}\nlauncher = "torchrun"'),
    "frontier": (f'{GRID}[frontier]\ndial = "num_hidden_layers"\nlargest = 32', f'{RUN}\nmemory_limit = "600KiB"'),
}
DEADLY = [
    *(signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM),
    *(signal.SIGBUS, signal.SIGHUP, signal.SIGRTMIN + 6),
]
KEPT = {"trials", "machine.json", "sweep.toml", "trials.csv", "progress.json", "frontier.json", "frontier.csv"}


class Run:
    """One run of the command, and what was done to it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.attacks: list[str] = []
        self.sent: set[int] = set()
        """Signals that the manager was sent."""
        self.hurt_ranks = False
        self.process, self.manager = process, psutil.Process(process.pid)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_for_a_moment(self, draw: random.Random) -> None:
        """Wait for the command's first second, or for the ranks of a trial and a part of what it takes."""
        if not self.attacks and draw.random() < 0.25:
            time.sleep(draw.uniform(0.0, 1.0))
            return
        deadline = time.monotonic() + 30
        while self.is_running and not ranks_of(self.manager) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 0.7))

    def interrupt(self, number: int) -> None:
        """Send the manager a signal, once it handles signals, so that what it does is its own."""
        while self.is_running and not listens_for_interrupts(self.process.pid):
            time.sleep(0.005)
        self.sent.add(number)
        send(self.manager, number)


def send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process.send_signal(number)


def stop(process: psutil.Process, seconds: float) -> str:
    """Stop a process for a while."""
    send(process, signal.SIGSTOP)
    time.sleep(seconds)
    send(process, signal.SIGCONT)
    return f"{seconds:.1f} s stopped"


def attack_manager(run: Run, draw: random.Random) -> str:
    """Interrupt it once or twice, end it, or stop it for a while."""
    kind = draw.choice(("interrupt", "interrupt", "interrupt twice", "end", "stop"))
    if kind == "stop":
        return stop(run.manager, draw.uniform(0.1, 3.0))
    number = draw.choice(DEADLY if kind == "end" else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    run.interrupt(number)
    if kind == "interrupt twice":
        time.sleep(draw.uniform(0.0, 0.4))
        run.interrupt(draw.choice((signal.SIGINT, signal.SIGTERM)))
    return f"{kind} {number}"


def attack_server(run: Run, draw: random.Random) -> str:
    """The fork server, or torchrun."""
    return _attack_one_of(children_of(run.manager), run, draw)


def attack_rank(run: Run, draw: random.Random) -> str:
    return _attack_one_of(ranks_of(run.manager), run, draw)


def _attack_one_of(processes: list[psutil.Process], run: Run, draw: random.Random) -> str:
    if not processes:
        return "nobody there"
    run.hurt_ranks = True
    process, kind = draw.choice(processes), draw.random()
    if kind < 0.2:
        return stop(process, draw.uniform(0.1, 2.0))
    number = signal.SIGSTOP if kind < 0.225 else draw.choice([*DEADLY, signal.SIGINT])
    send(process, number)
    return str(number)


def attack_group(run: Run, draw: random.Random) -> str:
    """A process group: the ranks', or the server's, or the manager's, as a terminal does."""
    one = draw.choice([run.manager, *children_of(run.manager), *ranks_of(run.manager)])
    number = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    run.hurt_ranks = True
    if one == run.manager:
        run.interrupt(number)
    with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
        if (group := os.getpgid(one.pid)) not in (os.getpgid(0), os.getpgid(run.process.pid)):
            os.killpg(group, number)
    return str(number)


def attack_everything(run: Run, draw: random.Random) -> str:
    run.hurt_ranks = True
    run.sent.add(signal.SIGKILL)
    everything = [run.manager, *children_of(run.manager), *ranks_of(run.manager)]
    for process in draw.sample(everything, len(everything)):
        send(process, signal.SIGKILL)
    return "9"


ATTACKS: tuple[Callable[[Run, random.Random], str], ...] = (
    *[attack_manager] * 3, attack_server, *[attack_rank] * 2, attack_group, attack_everything,
)  # fmt: skip


class Campaign:
    """One sweep under one launcher, run again and again while it is attacked."""

    def __init__(self, name: str, home: Path, draw: random.Random) -> None:
        self._name, self._home, self._draw, self._mark = name, home, draw, uuid.uuid4().hex
        (home / "tmp").mkdir()
        file = write_tiny_sweep(home, *SWEEPS[name], name)
        self.folder = home / "results" / "here" / name
        self._sweep = Sweep(file, home / "results", "--machine", "here")
        self._finished = Counter[str]()
        self._is_hurt = False

    def run(self, most_attacks: int) -> int:
        """Run the command once, with up to so many attacks, and check what it leaves; return their number."""
        before = self._sweep.records()
        run = Run(self._sweep.start(**{MARK: self._mark, "TMPDIR": str(self._home / "tmp")}))
        try:
            for _ in range(most_attacks):
                run.wait_for_a_moment(self._draw)
                if not run.is_running:
                    break
                one = self._draw.choice(ATTACKS)
                run.attacks.append(f"{one.__name__} {one(run, self._draw)}")
            code = run.process.wait(RUN_SECONDS)
            print(f"{self._name}, {code} after {run.attacks}:\n{self._sweep.log()[-2000:]}")
            self._check(run, code, self._sweep.log(), before)
            wait_until(lambda: not processes_with(MARK, self._mark), None, SECONDS_TO_END)  # no process is left
        finally:
            for process in processes_with(MARK, self._mark):
                send(process, signal.SIGKILL)
            run.process.wait()
        if code in (0, 1):
            self._check_completed(code)
        return len(run.attacks)

    def _check(self, run: Run, code: int, text: str, before: dict[str, bytes]) -> None:
        self._is_hurt |= run.hurt_ranks
        assert code in (0, 1, 2, 3, 130) or -code in run.sent
        assert code != 130 or run.sent, "interrupted by nobody"
        if code == 2:
            assert run.hurt_ranks
            assert "did not start" in text or "no process can be started" in text
        # A trial whose ranks were hurt says which of PyTorch's errors its other ranks met.
        ours = re.sub(r"^\[\d+/\d+\] .* crashed .*$", "", text, flags=re.MULTILINE) if self._is_hurt else text
        assert not re.search("Traceback|Exception ignored|Error:", ours)
        after = self._sweep.records()
        assert {trial: after.get(trial) for trial in before} == before, "a record was lost or changed"
        for trial in after.keys() - before.keys():
            record = read_record(after[trial], trial)
            assert record.id == trial
            is_budget = record.outcome is Outcome.OOM_HOST and "budget" in (record.reason or "")
            assert record.outcome is Outcome.OK or is_budget or self._is_hurt, record.reason
        self._finished.update(re.findall(r"^\[\d+/\d+\] ([0-9a-f]{12}) ", text, re.MULTILINE))
        assert max(self._finished.values(), default=0) <= 1, "a trial ran again after it had finished"

    def _check_completed(self, code: int) -> None:
        """The sweep is done: nothing but results is there; go on with a fresh folder."""
        assert {path.name for path in self.folder.iterdir() if not path.match(".writer.*")} <= KEPT
        assert not [*(self.folder / "trials").glob(".*")]
        outcomes = {read_record(data, "").outcome for data in self._sweep.records().values()}
        assert code == bool(outcomes & {Outcome.CRASHED, Outcome.TIMEOUT}) or self._name == "frontier"
        shutil.rmtree(self._home / "results")
        self._finished.clear()
        self._is_hurt = False
        assert not [name for name in os.listdir(self._home / "tmp") if not name.startswith("torchinductor_")]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[pytest.mark.slow] * (name != "fork")) for name in SWEEPS]
)
def test_a_sweep_attacked_at_random_moments_ends_with_every_record_once(launcher: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    draw, left = random.Random(SEED), COUNT
    campaign = Campaign(launcher, tmp_path, draw)
    while left:
        left -= campaign.run(min(draw.choice((2, 4, 8, 16)), left))
    campaign.run(0)  # without an attack, to the sweep's end
    assert not campaign.folder.exists()
