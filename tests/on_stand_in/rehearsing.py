"""Runs ``fsdp-bench rehearse``: its scripts in forks of processes that have imported torch, or in their own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.rehearse import run
from tests.conftest import run_command, run_process

STUBS = Path(__file__).parent / "stubs"
SCRIPTS = Path(__file__).parent / "scripts"

_TORCH = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor")
IMPORTED = {
    "torch": _TORCH,
    "transformers": (*_TORCH, "transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate"),
}
"""What forking processes have imported, by family. Not bitsandbytes, which starts CUDA; nor peft, which needs it."""

READ_AT_IMPORT = ("PYTHON", "PYTORCH", "TORCH", "CUDA", "LD_")
"""Beginnings of variables that decide what an import does: with others than the forking process's, no fork is alike."""


@dataclass(frozen=True)
class Rehearsed:
    document: dict[str, Any]
    output: str
    """What the script printed."""
    code: int

    @property
    def peak_bytes(self) -> int:
        return int(self.document["memory"]["peak_allocated_bytes"])


def rehearse(*words: str, folder: Path | None = None, command: str = "python", **environment: str) -> Rehearsed:
    """Run ``fsdp-bench rehearse --json``; ``words`` are its options, ``--``, and what follows the command.

    The script runs in a fork. That a fork is like a process of its own is tested in test_forks.py.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(run, "_run", _run_fork)
        done = run_command(*_with_tool(words, command), cwd=folder)
    return _rehearsed(done)


def rehearse_in_own_process(*words: str, folder: Path | None = None, command: str = "python") -> Rehearsed:
    """Run ``fsdp-bench rehearse --json`` as a user does, in new processes."""
    return _rehearsed(run_process(*_with_tool(words, command), cwd=folder))


def _with_tool(words: tuple[str, ...], command: str) -> list[str]:
    split = words.index("--") + 1
    return ["rehearse", "--json", *words[:split], str(Path(sys.executable).parent / command), *words[split:]]


def _rehearsed(done: subprocess.CompletedProcess[str]) -> Rehearsed:
    document = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return Rehearsed(document, done.stderr, done.returncode)


class _ForkServer:
    """A running fork_server.py."""

    def __init__(self, imported: tuple[str, ...], python: str, environment: dict[str, str]) -> None:
        self.read_at_import = _read_at_import(environment)
        script = str(Path(__file__).with_name("fork_server.py"))
        self._process = subprocess.Popen(
            [python, script, *imported],
            # numpy starts its threads on import; torch.cuda.is_available() would start CUDA
            env=environment | {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self._process.kill)

    def run(self, words: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Run a Python script; return its exit code and what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            request = {"words": words, "environment": environment, "folder": os.getcwd(), "output": output.name}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return code, output.read()


_servers: dict[str, _ForkServer] = {}


def _run_fork(words: list[str], environment: dict[str, str]) -> int:
    """Take the place of ``fsdp_bench.rehearse.run._run``."""
    python, script, plan = words  # without options of the interpreter: with some, a test needs a process of its own
    family = _family(json.loads(Path(plan).read_text()))
    server = _servers.get(family)
    if server is None:
        server = _servers[family] = _ForkServer(IMPORTED[family], python, environment)
    assert server.read_at_import == _read_at_import(environment), "this needs rehearse_in_own_process"
    code, output = server.run([script, plan], environment)
    sys.stderr.write(output)
    return code


def _family(plan: dict[str, Any]) -> str:
    """Return the family of a rehearsal: what its script imports."""
    scripts = [Path(word).read_text() for word in plan["words"] if word.endswith(".py")]
    is_of_hugging_face = plan["launcher"] == "accelerate" or any("transformers" in script for script in scripts)
    return "transformers" if is_of_hugging_face else "torch"


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
