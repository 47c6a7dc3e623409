"""Forks of a process that has loaded torch: each is like a new process, and pays for no import."""

import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from fsdp_bench.plan.rehearsal import rehearsed_gpu
from fsdp_bench.plan.rehearse_command import command_to_rehearse
from fsdp_bench.rehearse import prepared
from fsdp_bench.rehearse.prepared import PreparedPython
from fsdp_bench.rehearse.run import RunningRehearsal
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalReport
from tests.rehearse.inside.test_user_files import contents

SCRIPT = """
import os, random, sys
print("imported", "wave" in sys.modules, "own" in sys.modules, file=sys.stderr)
import wave, own
import torch
assert not torch.cuda.is_initialized()
assert "MINE" not in os.environ and open("data.txt").read() == "before" and not os.path.exists("new.txt")
os.environ["MINE"] = own.NAME
open("data.txt", "w").write("after")
open("new.txt", "w").write("new")
libraries = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
files = {line.split(maxsplit=5)[-1]: tuple(line.split()[3:5]) for line in open("/proc/self/maps") if ".so" in line}
assert len(set(files.values())) == len(files), "a library is loaded twice"
print("random", random.random(), torch.rand(1).item(), file=sys.stderr)
torch.ones(len(sys.argv), 1 << 20, device="cuda")
"""


def _reports(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, times: int = 2) -> list[RehearsalReport]:
    """Rehearse a script with 0, 1, ... arguments; the file ``N.txt`` beside the folder has what each prints."""
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(dedent(script))
    found = []
    with PreparedPython() as python:
        for number in range(times):
            asked = command_to_rehearse([sys.executable, "train.py", *map(str, range(number))], gpu="H100-SXM")
            gpu = rehearsed_gpu(asked.hardware.gpu, 500 << 20)
            with (
                (folder.parent / f"{number}.txt").open("w") as output,
                RunningRehearsal(asked.command, gpu, 0, asked.options, output.fileno(), python) as running,
            ):
                assert select.select([running], [], [], 120)[0]
                found.append(running.report())
    return found


NO_OVERLAYS = """
import json, os, pathlib, sys
(pathlib.Path(sys.argv[1]).parent / "entered.json").write_text(json.dumps({"error": "Operation not permitted"}))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Takes the place of rehearse/enter.py in most containers."""


@pytest.mark.parametrize("has_overlays", [True, False])
def test_a_rehearsal_sees_nothing_of_the_one_before_and_finds_imports_of_packages_done(
    has_overlays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the user's own module, which may have changed meanwhile."""
    if not has_overlays:
        (tmp_path / "enter.py").write_text(NO_OVERLAYS)
        monkeypatch.setattr(prepared, "ENTER", tmp_path / "enter.py")
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "data.txt").write_text("before")
    (folder / "own.py").write_text("NAME = 'own'")
    (folder / "train.py").write_text(dedent(SCRIPT))
    before = contents(folder)
    first, second = _reports(folder, SCRIPT, monkeypatch)
    outputs = [(tmp_path / f"{number}.txt").read_text() for number in range(2)]
    assert [report.outcome for report in (first, second)] == ["ended", "ended"], outputs
    assert "imported False False" in outputs[0]
    assert "imported True False" in outputs[1]
    randoms = [[line for line in output.splitlines() if line.startswith("random")] for output in outputs]
    assert randoms[0] != randoms[1]
    assert [report.peak.allocated_bytes for report in (first, second)] == [4 << 20, 8 << 20]
    assert {name: fact for name, fact in contents(folder).items() if name != "train.py"} == {
        name: fact for name, fact in before.items() if name != "train.py"
    }


PATCHES = """
import os, sys
print("imported", "wave" in sys.modules, file=sys.stderr)
import torch
{change}
import wave
"""


@pytest.mark.parametrize("change", ["os.environ['MINE'] = '1'", "torch.manual_seed = lambda seed: None"])
def test_what_is_imported_after_a_change_by_the_script_is_not_imported_before_it(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir()
    _reports(tmp_path / "user", PATCHES.format(change=change), monkeypatch)
    assert "imported False" in (tmp_path / "1.txt").read_text()


KILLED = """
import os, signal, sys
from fsdp_bench.plan.rehearsal import rehearsed_gpu
from fsdp_bench.plan.rehearse_command import command_to_rehearse
from fsdp_bench.rehearse.prepared import PreparedPython
from fsdp_bench.rehearse.run import RunningRehearsal
asked = command_to_rehearse([sys.executable, "-c", "import time; time.sleep(600)"], gpu="H100-SXM")
prepared = PreparedPython()
running = RunningRehearsal(asked.command, rehearsed_gpu(asked.hardware.gpu, 0), 0, asked.options, 2, prepared)
print(running._server._popen.pid, running._process._number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    numbers = [int(word) for word in ran.stdout.split()]
    assert (ran.returncode, len(numbers)) == (-signal.SIGKILL, 2)
    deadline = time.monotonic() + 60
    while any(map(_runs, numbers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, numbers))


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
