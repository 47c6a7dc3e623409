"""Reads the user's command: interpreter, launcher, and words that only the launcher knows (``inside/launch.py``)."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_bench.spec.errors import SpecError, shown

OTHER_LAUNCHERS = ("horovodrun", "ray")
CLUSTER_STARTERS = ("srun", "mpirun", "mpiexec", "sbatch", "jsrun")
ENVIRONMENT_STARTERS = ("poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba")
PROGRAM_STARTERS = ("nohup", "time", "nice", "numactl", "taskset", "sudo", "exec", "nsys", "ncu")

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
INTERPRETER_OPTION = re.compile(r"-([bBdEIOPqRsSuvx]*)(?:([mcWX])(.*))?", re.DOTALL)
"""Flags, then at most one option with a value, as in ``-uWignore``. -i, -h and -V leave nothing to rehearse."""


class RankStarter(StrEnum):
    """The launcher of the ranks."""

    NONE = "none"
    TORCHRUN = "torchrun"
    TORCH_LAUNCH = "torch.distributed.launch"
    ACCELERATE = "accelerate"


LAUNCHER_MODULES = {
    "torch.distributed.run": RankStarter.TORCHRUN,
    "torch.distributed.launch": RankStarter.TORCH_LAUNCH,
    "accelerate.commands.launch": RankStarter.ACCELERATE,
    "accelerate.commands.accelerate_cli": RankStarter.ACCELERATE,
}


@dataclass(frozen=True)
class Command:
    """A training command, taken apart."""

    python: Path
    """The interpreter that would run, absolute. Symbolic links are kept: a virtual environment is found by them."""
    interpreter_options: tuple[str, ...]
    """Such as ``-u``, ``-X``, ``dev``; without ``-m`` and ``-c``."""
    launcher: RankStarter
    launcher_words: tuple[str, ...]
    """The words that follow the launcher. Without one: ``-m MODULE``, ``-c CODE`` or a script, and its arguments."""
    environment: Mapping[str, str]
    """The variables that the command itself sets."""


def read_command(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Command:
    """Return what a command in ``folder`` runs. Raises SpecError if it is empty, not found or not Python."""
    assigned, words = _assignments(words)
    if words[:2] == ["uv", "run"]:
        of_uv, words = _uv_run(words[2:], {**environment, **assigned}, folder)
        assigned = of_uv | assigned
    if not words:
        raise SpecError("command: nothing to run; give it after --, such as -- torchrun --nproc-per-node 8 train.py")
    _refuse_what_is_not_python(words)
    search = {**environment, **assigned}.get("PATH", os.defpath)
    program, rest = find_program(words[0], search, folder), words[1:]
    if PYTHON.fullmatch(program.name):
        python = program
        options, rest = _interpreter_options(rest)
    else:
        python, options = interpreter_of(program, search, words[0])
        module = LAUNCHER_SCRIPTS.get(program.name)
        rest = ["-m", module, *rest] if module else [str(program), *rest]
    launcher, rest = _launched_module(rest)
    if launcher is RankStarter.NONE:
        _require_script(rest, folder)
    return Command(python, tuple(options), launcher, tuple(rest), assigned)


def _assignments(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the leading ``NAME=value`` words, with or without ``env`` before them, and the other words."""
    rest = list(words)
    has_env = bool(rest) and Path(rest[0]).name == "env"
    if has_env:
        rest = rest[1:]
    assigned: dict[str, str] = {}
    while rest and (match := ASSIGNMENT.fullmatch(rest[0])):
        assigned[match[1]] = match[2]
        rest = rest[1:]
    if has_env and rest and rest[0].startswith("-"):
        raise SpecError(f"command: env {shown(rest[0])} is not understood; env takes NAME=value here")
    return assigned, rest


def _uv_run(words: list[str], environment: Mapping[str, str], folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the variables that ``uv run`` sets, and the command after it, to be found in the project's environment."""
    if words[:1] == ["--"]:
        words = words[1:]
    if words and words[0].startswith("-") and words[0] != "-m":
        raise SpecError(f"command: uv run {shown(words[0])} is not understood; leave options of uv run away")
    if words and (words[0] == "-m" or words[0].endswith(".py")):
        words = ["python", *words]
    named = environment.get("UV_PROJECT_ENVIRONMENT") or environment.get("VIRTUAL_ENV") or ".venv"
    places = [folder / named] if "UV_PROJECT_ENVIRONMENT" in environment else []
    places += [place / ".venv" for place in (folder, *folder.parents)] + [folder / named]
    home = next((place for place in places if (place / "bin" / "python").exists()), None)
    if home is None:
        raise SpecError(f"command: uv run: no .venv in {shown(str(folder))} or above it; uv sync creates it")
    path = os.pathsep.join([str(home / "bin"), environment.get("PATH", os.defpath)])
    return {"VIRTUAL_ENV": str(home), "PATH": path}, words


def _refuse_what_is_not_python(words: Sequence[str]) -> None:
    """Raise the error for a command that starts a shell, another launcher, or a program that starts a program."""
    name = Path(words[0]).name
    if name in SHELLS or name.endswith((".sh", ".bash")):
        raise shell_script_error(words[0])
    if name in OTHER_LAUNCHERS:
        raise SpecError(
            f"command: the launcher {name} is not understood; {UNDERSTOOD}; start the script with torchrun or "
            "accelerate launch"
        )
    if name in CLUSTER_STARTERS or name in PROGRAM_STARTERS:
        raise SpecError(f"command: {name} is not understood; {UNDERSTOOD}; give the command after {name}")
    if name in ENVIRONMENT_STARTERS:
        raise SpecError(
            f"command: {name} is not understood; {UNDERSTOOD}; give the command after {name} run, in that environment"
        )


def _interpreter_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter's options, and what it runs: ``-m MODULE``, ``-c CODE`` or a script, and arguments."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--check-hash-based-pycs" and rest:
            options += [word, rest.pop(0)]
            continue
        match = INTERPRETER_OPTION.fullmatch(word)
        if not match:
            raise SpecError(f"command: python {shown(word)} is not an option with which a script can be rehearsed")
        flags, letter, value = match.groups()
        if flags:
            options.append(f"-{flags}")
        if letter and not value and not rest:
            raise SpecError(f"command: python -{letter} needs a value after it")
        if letter:
            value = value or rest.pop(0)
        if letter in ("m", "c"):
            return options, [f"-{letter}", value, *rest]
        if letter:
            options += [f"-{letter}", value]
    return options, rest


def _launched_module(program: list[str]) -> tuple[RankStarter, list[str]]:
    """Return the launcher that ``-m MODULE`` starts, if it is one, and what follows it."""
    if program[:1] != ["-m"] or program[1] not in LAUNCHER_MODULES:
        return RankStarter.NONE, program
    module, rest = program[1], program[2:]
    if module == "accelerate.commands.accelerate_cli":
        if rest[:1] != ["launch"]:
            verb = shown(rest[0]) if rest else "nothing"
            raise SpecError(f"command: accelerate is followed by {verb}; only accelerate launch starts a script")
        rest = rest[1:]
    return LAUNCHER_MODULES[module], rest


def _require_script(program: Sequence[str], folder: Path) -> None:
    if not program or program[0] == "-":
        raise SpecError("command: python has nothing to run; give a script, -m MODULE or -c CODE")
    if program[0] in ("-m", "-c"):
        return
    path = folder / program[0]
    if not path.exists():
        raise SpecError(f"command: the script {shown(program[0])} is not in {shown(str(folder))}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise SpecError(f"command: {shown(program[0])} is a folder without __main__.py; give a script, or -m MODULE")


UNDERSTOOD = "understood are python, torchrun, accelerate launch and other programs written in Python"
SHELLS = ("sh", "bash", "dash", "ksh", "zsh", "fish", "source", ".")
PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?")
LAUNCHER_SCRIPTS = {
    "torchrun": "torch.distributed.run",
    "accelerate-launch": "accelerate.commands.launch",
    "accelerate": "accelerate.commands.accelerate_cli",
}
"""Console scripts of launchers, and the modules that they start."""

SHEBANG_BYTES = 4096
"""As much of a script's beginning as is read to find its interpreter; a path on Linux is no longer."""


def find_program(word: str, search: str, folder: Path) -> Path:
    """Return the absolute path of a program, looked for as a shell does."""
    if "/" in word:
        path = Path(os.path.abspath(folder / word))
        if not path.is_file():
            where = "" if os.path.isabs(word) else f" in {shown(str(folder))}"
            raise SpecError(f"command: {shown(word)} is not a file{where}; give the path of a program that is there")
        if not os.access(path, os.R_OK | os.X_OK):
            raise SpecError(f"command: {shown(word)} may not be executed; write python before it if it is a script")
        return path
    found = shutil.which(word, path=search)
    if found is not None:
        return Path(os.path.abspath(folder / found))
    if (folder / word).is_file():
        raise SpecError(f"command: {shown(word)} is a file, not a program on PATH; write python before it")
    other = "; python3 is there" if word == "python" and shutil.which("python3", path=search) else ""
    raise SpecError(
        f"command: {shown(word)} is not found on PATH{other}; activate the environment that has it, or give its path"
    )


def interpreter_of(script: Path, search: str, word: str) -> tuple[Path, list[str]]:
    """Return the interpreter of a script's first line, and the options there.

    pip and uv write ``#!/bin/sh`` and ``'''exec' PYTHON "$0" "$@"`` where the path is too long for a first line.
    """
    with script.open("rb") as file:
        lines = file.read(SHEBANG_BYTES).decode("utf-8", "replace").splitlines()
    is_pip_form = len(lines) > 1 and lines[0].startswith("#!/bin/sh") and lines[1].startswith("'''exec'")
    first = lines[1].removesuffix(' "$0" "$@"') if is_pip_form else lines[0][2:] if lines else ""
    words = _split(first)[1 if is_pip_form else 0 :]
    if not lines or not lines[0].startswith("#!") or not words:
        ending = "write python before it" if script.suffix == ".py" else UNDERSTOOD
        raise SpecError(f"command: {shown(word)} is not a program written in Python; {ending}")
    if Path(words[0]).name == "env":
        words = words[2 if words[1:2] == ["-S"] else 1 :]
    name = Path(words[0]).name if words else ""
    if PYTHON.fullmatch(name):
        return find_program(words[0], search, script.parent), words[1:]
    if script.name in LAUNCHER_SCRIPTS:  # a shim, as pyenv's: it looks for the program when it runs
        module = LAUNCHER_SCRIPTS[script.name]
        raise SpecError(f"command: {shown(str(script))} does not name its interpreter; write python -m {module}")
    if name in SHELLS:
        raise shell_script_error(word)
    raise SpecError(f"command: {shown(word)} is run by {shown(name)}; {UNDERSTOOD}")


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote without its end
        return line.split()


def shell_script_error(word: str) -> SpecError:
    """Return the error for a command that a shell would run."""
    return SpecError(
        f"command: {shown(word)} is a shell or a shell script; {UNDERSTOOD}; give the python, torchrun or accelerate "
        "command inside it"
    )
