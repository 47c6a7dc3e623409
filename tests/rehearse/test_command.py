"""A user's command is read as a shell, Python and launchers read it; and the process that a rehearsal starts."""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from fsdp_bench.rehearse import run
from fsdp_bench.rehearse.command import Command, RankStarter, read_command
from fsdp_bench.rehearse.inside.main import END_SIGNAL
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalOptions, RehearsalOutcome, RehearsalPlan, RehearsalReport
from tests.conftest import message_of
from tests.rehearse.conftest import gpu_of
from tests.report.test_rehearsal_text import REPORT

PIP_LONG_PATH = "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\nimport sys\n"
"""pip/_vendor/distlib/scripts.py, ScriptMaker._build_shebang: where the path is longer than a first line may be."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a script, and a bin folder with python, python3.12 and the launchers' console scripts."""
    project, programs = tmp_path / "project", tmp_path / "my programs"
    project.mkdir()
    programs.mkdir()
    (project / "train.py").write_text("")
    for name in ("python", "python3", "python3.12"):
        (programs / name).symlink_to(sys.executable)
    for name in ("torchrun", "accelerate-launch", "litgpt"):
        program(programs / name, f"#!{programs.parent}/bin/python -s\nimport sys\n")
    program(programs / "accelerate", PIP_LONG_PATH.format(python=programs / "python"))
    (tmp_path / "bin").symlink_to(programs)
    return project


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def read(folder: Path, line: str, **environment: str) -> Command:
    return read_command(line.split(), {"PATH": str(folder.parent / "bin"), **environment}, folder)


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ("python train.py", (), ("train.py",)),
        ("python train.py -u --x 1 -- y", (), ("train.py", "-u", "--x", "1", "--", "y")),
        ("python -u -X dev -W ignore -OB train.py a", ("-u", "-X", "dev", "-W", "ignore", "-OB"), ("train.py", "a")),
        ("python -uWignore -Xdev train.py", ("-u", "-W", "ignore", "-X", "dev"), ("train.py",)),
        ("python -m pkg.train --x", (), ("-m", "pkg.train", "--x")),
        ("python -um pkg", ("-u",), ("-m", "pkg")),
        ("python -mpkg -m other", (), ("-m", "pkg", "-m", "other")),
        ("python -c pass -c", (), ("-c", "pass", "-c")),
        ("python -ccode", (), ("-c", "code")),
        ("python --check-hash-based-pycs always train.py", ("--check-hash-based-pycs", "always"), ("train.py",)),
        ("python3.12 ../project/train.py", (), ("../project/train.py",)),
    ],
)
def test_the_interpreters_options_end_where_the_program_begins(
    folder: Path, line: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    command = read(folder, line)
    assert (command.launcher, command.interpreter_options, command.launcher_words) == (RankStarter.NONE, options, words)
    assert command.python == folder.parent / "bin" / line.split()[0]  # the link itself: a virtual environment's


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("torchrun", RankStarter.TORCHRUN),
        ("../bin/torchrun", RankStarter.TORCHRUN),
        ("python -u -m torch.distributed.run", RankStarter.TORCHRUN),
        ("python -m torch.distributed.launch", RankStarter.TORCH_LAUNCH),
        ("accelerate launch", RankStarter.ACCELERATE),
        ("accelerate-launch", RankStarter.ACCELERATE),
        ("python -m accelerate.commands.launch", RankStarter.ACCELERATE),
        ("python -m accelerate.commands.accelerate_cli launch", RankStarter.ACCELERATE),
    ],
)
def test_a_launchers_words_are_left_to_the_launcher(folder: Path, line: str, launcher: RankStarter) -> None:
    command = read(folder, f"{line} --nproc-per-node 8 nowhere.py --x")
    assert command.launcher is launcher
    assert command.launcher_words == ("--nproc-per-node", "8", "nowhere.py", "--x")
    assert command.python.name == "python"
    assert command.python.exists()


@pytest.mark.parametrize(
    ("first_lines", "options"),
    [
        ("#!{python}\n", ()),
        ("#! {python} -sE\n", ("-sE",)),
        ("#!/usr/bin/env python\n", ()),
        ("#!/usr/bin/env -S python -u\n", ("-u",)),
        ("#!/bin/sh\n'''exec' '{home}/my programs/python' \"$0\" \"$@\"\n' '''\n", ()),  # uv's
        (PIP_LONG_PATH.replace("{python}", "{home}/my programs/python"), ()),
    ],
)
def test_a_console_script_runs_in_the_interpreter_of_its_first_line(
    folder: Path, first_lines: str, options: tuple[str, ...]
) -> None:
    home = folder.parent
    script = home / "bin" / "tool"
    program(script, first_lines.format(python=home / "bin" / "python", home=home))
    command = read(folder, "tool run --x")
    assert command.python.samefile(home / "bin" / "python")
    assert not command.python.is_relative_to(folder)
    assert command.interpreter_options == options
    assert (command.launcher, command.launcher_words) == (RankStarter.NONE, (str(script), "run", "--x"))


@pytest.mark.parametrize("line", ["A=1 B=x=y python train.py", "env A=1 B=x=y python train.py"])
def test_variables_before_the_command_are_kept(folder: Path, line: str) -> None:
    command = read(folder, line)
    assert command.environment == {"A": "1", "B": "x=y"}
    assert command.launcher_words == ("train.py",)


def test_a_path_that_the_command_sets_is_searched(folder: Path) -> None:
    assert read(folder, f"PATH={folder.parent / 'bin'} python train.py", PATH="").python == folder.parent / "bin/python"


@pytest.mark.parametrize("words", ["train.py --x", "python train.py --x", "-- python train.py --x"])
def test_uv_run_is_the_projects_own_environment(folder: Path, words: str) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    command = read(folder, f"A=1 uv run {words}")
    assert command.python == folder / ".venv" / "bin" / "python"
    assert command.launcher_words == ("train.py", "--x")
    assert command.environment["A"] == "1"
    assert command.environment["VIRTUAL_ENV"] == str(folder / ".venv")
    assert command.environment["PATH"].split(os.pathsep)[0] == str(folder / ".venv" / "bin")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "nothing to run"),
        ("A=1", "nothing to run"),
        ("env -i python train.py", "env '-i' is not understood"),
        ("bash run.sh", "inside it"),
        ("./run.sh", "inside it"),
        ("./without_suffix", "inside it"),
        ("ray job", "with torchrun or accelerate launch"),
        ("horovodrun train.py", "with torchrun or accelerate launch"),
        ("/usr/bin/srun python train.py", "give the command after srun"),
        ("mpirun -n 4 python train.py", "give the command after mpirun"),
        ("poetry run python train.py", "give the command after poetry run"),
        ("uv run --with torch train.py", "uv run '--with' is not understood"),
        ("uv run train.py", "no .venv"),
        ("no_such_program train.py", "not found on PATH"),
        ("../bin/no_such_program train.py", "is not a file"),
        ("train.py", "write python before it"),
        ("./train.py", "write python before it"),
        ("./executable.py", "write python before it"),
        ("./compiled", "not a program written in Python"),
        ("./perl", "is run by 'perl'"),
        ("./empty", "not a program written in Python"),
        ("python", "nothing to run"),
        ("python -u", "nothing to run"),
        ("python -", "nothing to run"),
        ("python -m", "-m needs a value"),
        ("python -V", "'-V' is not an option"),
        ("python -i train.py", "'-i' is not an option"),
        ("python nowhere.py", "the script 'nowhere.py' is not in"),
        ("python .", "without __main__.py"),
        ("accelerate config", "accelerate is followed by 'config'"),
        ("accelerate", "accelerate is followed by nothing"),
        ("./torchrun train.py", "write python -m torch.distributed.run"),  # pyenv's shims are scripts of bash
    ],
)
def test_what_cannot_be_rehearsed_is_one_line_with_what_would_help(folder: Path, line: str, said: str) -> None:
    program(folder / "run.sh", "python train.py\n")
    program(folder / "without_suffix", "#!/usr/bin/env bash\npython train.py\n")
    program(folder / "executable.py", "import torch\n")
    program(folder / "perl", "#!/usr/bin/perl\n")
    program(folder / "torchrun", "#!/usr/bin/env bash\nexec pyenv exec torchrun\n")
    program(folder / "empty", "")
    (folder / "compiled").write_bytes(b"\x7fELF\x02\xff\n")
    (folder / "compiled").chmod(0o755)
    assert said in message_of(lambda: read(folder, line))


def test_a_python_that_is_only_there_as_python3_is_named(folder: Path) -> None:
    (folder.parent / "bin" / "python").unlink()
    with pytest.raises(SpecError, match="python3 is there"):
        read(folder, "python train.py")


GPU = gpu_of(8.9)


@pytest.fixture(autouse=True)
def _a_stand_in_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "find_torch", lambda python: None)
    monkeypatch.setattr(run, "build_stand_in", lambda torch: tmp_path)


class EndedProcess:
    """Takes the place of a rehearsal's process."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._ended = os.open(os.devnull, os.O_RDONLY)  # always readable

    def fileno(self) -> int:
        return self._ended

    def end(self) -> int:
        return self._code


def rehearsed(environment: dict[str, str], timeout_seconds: float | None = None) -> RehearsalReport:
    command = Command(Path(sys.executable), (), RankStarter.NONE, ("-c", "pass"), environment)
    return run.rehearse(command, GPU, 0, RehearsalOptions(world_size=1, gpus_per_node=1), timeout_seconds)


def started(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], code: int) -> tuple[dict[str, str], str]:
    """Return the environment of a command's process that ends with a code, and the error."""
    seen: list[dict[str, str]] = []

    def instead(_words: list[str], environment: dict[str, str], _output: object) -> EndedProcess:
        seen.append(environment)
        return EndedProcess(code)

    monkeypatch.setattr(run, "_Process", instead)
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
    process = run._Process([sys.executable, "-c", script, str(tmp_path / "pid")], dict(os.environ), (0, 1, 2))
    select.select([process], [], [])
    assert process.end() == 0
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(30)


@pytest.mark.parametrize("cut", [RehearsalOutcome.TIMED_OUT, RehearsalOutcome.INTERRUPTED])
def test_what_was_seen_is_kept_of_a_script_that_is_ended(
    monkeypatch: pytest.MonkeyPatch, cut: RehearsalOutcome
) -> None:
    """The script reports when it is asked to, after its timeout or an interrupt of this process."""
    script = (
        "import shutil, signal, sys, time\n"
        f"signal.signal({END_SIGNAL}, lambda *_: (shutil.copy(sys.argv[1], sys.argv[2]), sys.exit()))\n"
        "time.sleep(600)"
    )
    begin = run._Process

    def instead(words: list[str], environment: dict[str, str], output: tuple[int, int, int]) -> run._Process:
        report = from_json(Path(words[-1]).read_bytes(), RehearsalPlan).report
        seen = Path(report).with_name("seen.json")
        seen.write_bytes(to_json(replace(REPORT, outcome=RehearsalOutcome.INTERRUPTED)))
        return begin([sys.executable, "-c", script, str(seen), report], environment, output)

    monkeypatch.setattr(run, "_Process", instead)
    if cut is RehearsalOutcome.INTERRUPTED:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    report = rehearsed({}, 1.0 if cut is RehearsalOutcome.TIMED_OUT else None)
    assert (report.outcome, report.spans) == (cut, REPORT.spans)
