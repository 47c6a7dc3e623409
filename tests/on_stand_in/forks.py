"""Runs Python scripts in forks of a process that has imported their packages, which takes a new process seconds.

test_forks.py compares forks with new processes.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_MODULES = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate", "peft", "bitsandbytes"),
)

_READ_AT_IMPORT = ("PYTHON", "PYTORCH", "TORCH", "LD_", "STAND_IN_CAPABILITY")
"""Prefixes of environment variables that imports read."""
_READ_LATER = {"TORCHINDUCTOR_CACHE_DIR"}

FORKED_CAPABILITY = "90"
"""The compute capability of all forks: the stand-in chooses kernels by it when torch is loaded."""


class _ForkServer:
    """A running fork_server.py."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self._read_at_import = _read_at_import(environment)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("fork_server.py")), *_MODULES],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # numpy starts its threads on import
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        atexit.register(self._process.kill)

    def run(self, request: Mapping[str, object], environment: Mapping[str, str]) -> int:
        """Run a script; return its exit code."""
        assert self._read_at_import == _read_at_import(environment), "this script needs its own process"
        with suppress(BrokenPipeError):  # how it ended is reported below
            self._process.stdin.write(json.dumps({**request, "environment": dict(environment)}) + "\n")
            self._process.stdin.flush()
        code = self._process.stdout.readline()
        assert code, f"the process that forks has ended: {self._how_it_ended()}"
        return int(code)

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        return f"exit code {code}\n{self._errors.read()}"


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environment if name.startswith(_READ_AT_IMPORT)} - _READ_LATER
    return {name: environment[name] for name in names}


_servers: dict[str, _ForkServer] = {}
"""By interpreter."""


def run_python(
    python: str, words: Sequence[str], environment: Mapping[str, str], given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script that ends with ``os._exit`` on the stand-in, in a fork.

    If the GPU is of another generation, or if the environment configures PyTorch's allocator, run it in a new process.
    """
    if environment["STAND_IN_CAPABILITY"] != FORKED_CAPABILITY or "PYTORCH_CUDA_ALLOC_CONF" in environment:
        command = [python, "-W", "ignore", *words]
        return subprocess.run(command, input=given, env=environment, capture_output=True, text=True)
    server = _servers.get(python)
    if server is None:
        server = _servers[python] = _ForkServer(python, environment)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("input", "output", "errors")}
        for path in files.values():
            path.touch()
        files["input"].write_text(given)
        request = {"words": list(words), "folder": os.getcwd(), **{name: str(path) for name, path in files.items()}}
        code = server.run(request, environment)
        return subprocess.CompletedProcess(words, code, files["output"].read_text(), files["errors"].read_text())
