"""Runs ``fsdp-bench rehearse``, with the script in a fork of a process that has imported torch, or in a new process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import IO, Any

import pytest

from fsdp_bench.rehearse.run import RunningRehearsal
from tests.conftest import run_command, run_process
from tests.on_stand_in.interpreters import prepared_python

KINDS = {
    "trainer": ("torchrun", ["trainer_fsdp.py"]),
    "lora": ("torchrun", ["trainer_fsdp.py", "lora"]),
    "accelerate": ("accelerate", ["launch", "--config_file", "fsdp2.yaml", "accelerate_loop.py"]),
    "fsdp2": ("torchrun", ["fsdp2_loop.py"]),
    "compiled": ("torchrun", ["compiled_blocks.py"]),
}
"""Training scripts in the folder scripts/: the command that starts each, and its words."""
STUBS = Path(__file__).parent / "stubs"
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Rehearsed:
    document: dict[str, Any]
    output: str
    """The script's output."""

    @property
    def peak_bytes(self) -> int:
        return int(self.document["memory"]["peak_allocated_bytes"])


def rehearse(
    *words: str,
    folder: Path | None = None,
    command: str = "python",
    code: int = 0,
    question: str = "rehearse",
    **environment: str,
) -> Rehearsed:
    """Run ``fsdp-bench rehearse --json``, or another question about a script, which must end with a code.

    ``words`` are its options, ``--``, and what follows the command.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(RunningRehearsal, "__init__", _start_in_fork)
        with _errors() as printed:
            done = run_command(*_with_tool(words, command, question), cwd=folder)
            printed.seek(0)
            done.stderr += printed.read()
    return _rehearsed(done, code)


def rehearse_kind(kind: str, *options: str, folder: Path, code: int = 0, **environment: str) -> Rehearsed:
    """Rehearse one of KINDS."""
    command, words = command_of(*KINDS[kind])
    return rehearse(*options, "--", *words, command=command, folder=folder, code=code, **environment)


def command_of(command: str, words: list[str]) -> tuple[str, list[str]]:
    """Return a command with the paths of its files."""
    return command, [str(SCRIPTS / word) if word.endswith((".py", ".yaml")) else word for word in words]


def rehearse_script(folder: Path, script: str, *options: str, code: int = 0) -> Rehearsed:
    """Rehearse the text of a script on eight H100."""
    (folder / "script.py").write_text(dedent(script))
    return rehearse("--gpu", "H100-SXM", "--world-size", "8", *options, "--", "script.py", folder=folder, code=code)


def rehearse_in_own_process(
    *words: str, folder: Path | None = None, command: str = "python", code: int = 0
) -> Rehearsed:
    """Do the same in new processes, as for a user."""
    return _rehearsed(run_process(*_with_tool(words, command), cwd=folder), code)


def _with_tool(words: tuple[str, ...], command: str, question: str = "rehearse") -> list[str]:
    split = words.index("--") + 1
    return [question, "--json", *words[:split], str(Path(sys.executable).parent / command), *words[split:]]


def _rehearsed(done: subprocess.CompletedProcess[str], code: int) -> Rehearsed:
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return Rehearsed(document, done.stderr)


@contextmanager
def _errors() -> Iterator[IO[str]]:
    """Let what other processes write to standard error go to a file."""
    own = os.dup(2)
    try:
        with tempfile.TemporaryFile("w+") as file:
            os.dup2(file.fileno(), 2)
            yield file
    finally:
        os.dup2(own, 2)
        os.close(own)


_start = RunningRehearsal.__init__


def _start_in_fork(self: RunningRehearsal, *given: Any, prepared: Any = None, **named: Any) -> None:
    _start(self, *given, prepared=prepared_python(), **named)
