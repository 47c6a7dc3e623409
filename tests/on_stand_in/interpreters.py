"""Python interpreters with torch's CUDA build, and functions that run scripts in them on the stand-in.

FSDP_BENCH_TEST_CUDA_PYTHONS lists the interpreters, separated by ":"; the default is the running one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from fsdp_bench.rehearse.build import build_stand_in, environment_of, stand_in_environment
from fsdp_bench.rehearse.find_torch import Torch, find_torch
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.on_stand_in.forks import run_python

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
