"""Prints the environment variables with which other processes of this interpreter run on the stand-in, as JSON.

``python -m fsdp_bench.rehearse.environment GPU FOLDER``, where GPU is a RehearsedGpu in JSON, and FOLDER takes the
stand-in where it cannot be kept. Rehearsed sweeps call it: sweep may not import this package. The answer is an object:
variables and their values, or ``error`` and why this machine cannot rehearse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fsdp_bench.rehearse.build import StandInGpu, build_stand_in, stand_in_environment
from fsdp_bench.rehearse.find_torch import find_torch
from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import FsdpBenchError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu


def environment_of(gpu: RehearsedGpu, otherwise: Path | None = None) -> dict[str, str]:
    """Return the variables for a GPU. The stand-in is compiled if it is not there yet; ``otherwise``: build_stand_in's.

    Raises:
        MachineError: if the interpreter has no CUDA build of torch, or there is no C compiler.
    """
    stand_in = StandInGpu(
        name=gpu.product_name,
        total_bytes=gpu.usable_bytes,
        context_bytes=gpu.kept_free_bytes,
        compute_capability=gpu.compute_capability,
        num_multiprocessors=gpu.num_multiprocessors,
    )
    variables = stand_in_environment(build_stand_in(find_torch(sys.executable), otherwise), stand_in)
    return {**variables, "CUDA_VISIBLE_DEVICES": "0"}  # a job's own choice is of GPUs of this machine


def main() -> None:
    """Print the variables, or the error."""
    try:
        answer = environment_of(from_json(sys.argv[1].encode(), RehearsedGpu), Path(sys.argv[2]))
    except FsdpBenchError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
