"""Starts dry runs in subprocesses. Each imports torch once and runs one spec after another."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Unpack

import msgspec

from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.plan.ask import read_setup
from fsdp_bench.spec.codec import from_json, to_builtins
from fsdp_bench.spec.errors import ExitCode, FsdpBenchError, MachineError, SpecError, install_hint
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import SetupFields, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunResult, DryRunSpec, KernelSet
from fsdp_bench.spec.subprocesses.own_python import own_python
from fsdp_bench.sweep.launchers.launcher import signal_name
from fsdp_bench.sweep.launchers.processes import last_lines_of, worker_environment
from fsdp_bench.sweep.machine import torch_version

NEEDS_CODE = "recorded: a dry run runs the code itself, --module PKG.MOD:FUNCTION; predict answers for recorded models"


class DryRunError(FsdpBenchError):
    """A dry run failed in PyTorch or in fsdp-bench, not because of its input. The message is one line."""

    exit_code = ExitCode.CRASHED


def dry_run(
    model: str | Path | ModelShape,
    setup: TrainSetup | None = None,
    kernels: KernelSet = "cuda",
    **setup_fields: Unpack[SetupFields],
) -> DryRunResult:
    """Run PyTorch's own FSDP code as rank 0, on tensors without data: ``dry_run("7B", world_size=8, api="fsdp2")``.

    Needs torch but no GPU; takes seconds, in a process of its own. Sizes in the answer are in bytes.

    Args:
        model: a name of the catalogue, a size like ``"7B"``, the path of a Hugging Face config.json, or a ModelShape.
        setup: the training setup; by default bf16-mixed, and 4096 tokens or all positions of a model with fewer.
        kernels: the device whose kernels are assumed: ``cpu`` or ``cuda``.
        setup_fields: fields of TrainSetup by name, enums also as text (case-insensitive). They override ``setup``.

    Raises:
        SpecError: for values that are not allowed, naming the field, the value and the allowed values.
        MachineError: for setups that a dry run does not support, or not with this version of torch.
        DryRunError: if PyTorch's code fails.
    """
    found = read_setup(setup, setup_fields, find_model(model))
    shape = find_model(model, found.sequence_length)
    if isinstance(shape, RecordedModel):
        raise SpecError(NEEDS_CODE)
    ((_index, answer),) = dry_runs([DryRunSpec(model=shape, setup=found, kernels=kernels)])
    return result_of(answer)


def result_of(answer: DryRunAnswer) -> DryRunResult:
    """Return an answer's result. Raises MachineError for what the user can correct, else DryRunError."""
    if answer.result is None:
        raise (MachineError if answer.users_mistake else DryRunError)(str(answer.error))
    return answer.result


def dry_runs(specs: Sequence[DryRunSpec], num_processes: int = 1) -> Iterator[tuple[int, DryRunAnswer]]:
    """Run specs dry; yield each answer as soon as it is done, with the index of its spec.

    Each process imports torch once. One that a spec ends is that answer's error, and another goes on. Raises
    MachineError if torch is not installed.
    """
    if torch_version() is None:
        raise MachineError(f"a dry run needs torch: {install_hint('train')}")
    workers, idle = [_Worker() for _ in range(min(num_processes, len(specs)))], SimpleQueue[_Worker]()
    for worker in workers:
        idle.put(worker)

    def answer(index: int) -> tuple[int, DryRunAnswer]:
        worker = idle.get()
        try:
            return index, worker.answer(specs[index])
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(max(len(workers), 1))
    try:
        for future in as_completed([pool.submit(answer, index) for index in range(len(specs))]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()  # even during a dry run
        pool.shutdown()
        for worker in workers:
            worker.close()


class _Worker:
    """A process ``python -m fsdp_bench.train.dry_run.main``, started when it is needed, and again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _started(self) -> subprocess.Popen[bytes]:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
        return subprocess.Popen(
            own_python("fsdp_bench.train.dry_run.main", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=worker_environment(),
        )

    def answer(self, spec: DryRunSpec) -> DryRunAnswer:
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(to_builtins(spec)) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return from_json(line, DryRunAnswer)
        code = process.wait()
        how = f"by {signal_name(-code)}" if code < 0 else f"with code {code}"
        printed = " ".join(last_lines_of(self._log, 1)) or "no message"
        self.close()
        return DryRunAnswer(error=f"the dry run's process ended {how}: {printed}", users_mistake=False)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None
