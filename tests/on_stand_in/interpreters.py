"""Python interpreters with torch's CUDA build, and functions that run scripts in them on the stand-in.

Scripts run in forks of a process that has imported their packages, which takes a new process seconds; test_forks.py
compares forks with new processes. FSDP_BENCH_TEST_CUDA_PYTHONS lists the interpreters, separated by ":"; the default is
the running one.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from fsdp_bench.rehearse.build import build_stand_in, environment_of, stand_in_environment
from fsdp_bench.rehearse.find_torch import Torch, find_torch
from fsdp_bench.rehearse.prepared import ForkServer, PreparedPython
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.files import private_folder
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tools.frameworks.environment import Environments
from tools.frameworks.matrix import NEWEST_TORCH, read_matrix

_MODULES = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate", "peft", "bitsandbytes"),
)

_READ_AT_IMPORT = ("PYTHON", "PYTORCH", "TORCH", "LD_", "STAND_IN_CAPABILITY")
"""Prefixes of environment variables that imports read."""
_READ_LATER = {"TORCHINDUCTOR_CACHE_DIR"}

FORKED_CAPABILITY = "90"
"""The compute capability of all forks: the stand-in chooses kernels by it when torch is loaded."""


class _PreparedPython(PreparedPython):
    """One process for all scripts, which imports what any of them may."""

    def server(self, python: Sequence[str], script: object, environment: Mapping[str, str]) -> ForkServer | None:
        """Return None if the GPU is of another generation, or if the environment configures PyTorch's allocator."""
        if environment["STAND_IN_CAPABILITY"] != FORKED_CAPABILITY or "PYTORCH_CUDA_ALLOC_CONF" in environment:
            return None
        return super().server(python, script, environment)

    def is_read_by_imports(self, variable: str) -> bool:
        return variable.startswith(_READ_AT_IMPORT) and variable not in _READ_LATER


@cache
def prepared_python() -> PreparedPython:
    """Return the processes that are forked, as long as the tests run."""
    prepared = _PreparedPython(_MODULES)
    atexit.register(prepared.__exit__)
    return prepared


@cache
def python_with_trl() -> str:
    """Return an interpreter with TRL and datasets beside this one's packages, made once and kept.

    They are not in this one's environment: transformers would import datasets in every test, three times as long.
    """
    framework = next(one for one in read_matrix() if one.framework == "TRL")
    kept = private_folder("frameworks")
    assert kept is not None
    return str(
        Environments(kept, {NEWEST_TORCH: Path(sys.executable)}).programs(framework, framework.releases[0]) / "python"
    )


def run_python(
    python: str, words: Sequence[str], environment: Mapping[str, str], given: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script that ends with ``os._exit`` on the stand-in: in a fork if it can be one."""
    server = prepared_python().server([python], None, environment)
    if server is None:
        command = [python, "-W", "ignore", *words]
        return subprocess.run(command, input=given, env=environment, capture_output=True, text=True)
    with (
        tempfile.TemporaryFile("w+") as asked,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        asked.write(given)
        for file in (asked, out, err):
            file.seek(0)
        number = server.fork(words, environment, None, [file.fileno() for file in (asked, out, err)])
        assert number is not None, server.error
        code = server.wait(number)
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


WITHOUT_FINALIZING = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
"""The end of a script, as ``fsdp-bench rehearse`` ends one too. While Python finalizes, a thread of autograd may
still ask for the GIL, which ends that thread in the middle of C++ and aborts the process."""

GPU = rehearsed_gpu("H100-SXM", 500 << 20)


def _torches() -> list[Torch]:
    found = []
    for python in os.environ.get("FSDP_BENCH_TEST_CUDA_PYTHONS", sys.executable).split(":"):
        try:
            found.append(find_torch(python))
        except MachineError:
            continue
    return found


TORCHES = _torches()

every_torch = [
    pytest.mark.skipif(not TORCHES, reason="no CUDA build of torch"),
    pytest.mark.parametrize("torch", TORCHES, ids=lambda torch: torch.version),
]


def run_on_stand_in(torch: Torch, script: str, gpu: RehearsedGpu = GPU, **variables: str) -> str:
    """Run a script in torch's interpreter on the stand-in; return what it prints. It must succeed."""
    return _run(torch.python, script, stand_in_environment(build_stand_in(torch), gpu) | variables)


def run_on_gpu(name: str, script: str, given: str) -> str:
    """Run a script in this interpreter on the stand-in for a GPU of the catalogue; return what it prints."""
    return _run(sys.executable, script, environment_of(rehearsed_gpu(name)), given)


ALLOCATED = """
import json, sys
import torch

torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")

def allocated(run, signs={"alloc": 1}):
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    made = run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    print(json.dumps([signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]))
"""


def allocations_on_gpu(name: str, script: str, given: object = None) -> list[list[int]]:
    """Run a script on the stand-in for a GPU of the catalogue; return the sizes of each ``allocated(...)`` there.

    ``given`` is its standard input, as JSON.
    """
    return [json.loads(line) for line in run_on_gpu(name, ALLOCATED + script, json.dumps(given)).splitlines()]


def _run(python: str, script: str, variables: Mapping[str, str], given: str = "") -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script + WITHOUT_FINALIZING)
        ran = run_python(python, [str(path)], {**os.environ, **variables}, given)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def nvidia_headers() -> list[Path]:
    """Return folders of pip's packages that hold CUDA's headers."""
    return sorted({path.parent for torch in TORCHES for path in torch.folder.parent.glob("nvidia/*/include/cuda.h")})
