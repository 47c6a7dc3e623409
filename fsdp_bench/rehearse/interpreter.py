"""Finds a program as a shell does, and the Python interpreter that runs it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

from fsdp_bench.spec.errors import SpecError, shown

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
