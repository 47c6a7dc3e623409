"""One rank of one trial: build, wrap, train, measure, write one report, exit. Never manages anything.

The fork server calls run_rank, and so does torchrun_rank.py under torchrun.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from fsdp_bench.spec.codec import to_json, write_atomically
from fsdp_bench.spec.record import WITHOUT_COMMUNICATION, Failure, MemoryReading, Outcome, RankReport, TrialSpec
from fsdp_bench.spec.setup import Offload
from fsdp_bench.train.measuring.communication import measure_communication
from fsdp_bench.train.measuring.meters import MemoryMeter, Unmetered, build_meter
from fsdp_bench.train.measuring.nvml import Nvml, TelemetrySampler
from fsdp_bench.train.measuring.replaced_collectives import go_through_the_host
from fsdp_bench.train.measuring.silent_world import (
    WARMUP_STEPS,
    enter_silent_world,
    join_silent_world,
    silence,
    time_steps,
)
from fsdp_bench.train.measuring.storage_tracker import BudgetExceeded
from fsdp_bench.train.models.attention_kernel import attention_kernel
from fsdp_bench.train.models.data import batches
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.loss import loss_function
from fsdp_bench.train.models.optimizer import build_optimizer
from fsdp_bench.train.models.transformer import BLOCKS, build, initialize
from fsdp_bench.train.processes.rendezvous import meet
from fsdp_bench.train.step import Training, build_scaler, train_step
from fsdp_bench.train.wrapping.fsdp1 import release
from fsdp_bench.train.wrapping.readback import effective_setup, local, optimizer_states, storage_bytes
from fsdp_bench.train.wrapping.wrap import ShardsNothingWarning, fsdp

SNAPSHOT_ENTRIES = 100_000
"""Allocations and frees that a snapshot holds; the last ones, where there are more."""
_OUT_OF_DEVICE_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Cuda failure 2",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What torch's allocator, the driver (which loads kernels when they are first used), NCCL, cuBLAS and cuDNN say."""

_trials_in_process = itertools.count(1)
"""How many trials this process has begun: one, unless they share it."""


def report_path(scratch: Path, rank: int) -> Path:
    """Return where a rank writes its report."""
    return scratch / f"rank-{rank}.json"


def phase_path(scratch: Path, rank: int) -> Path:
    """Return where a rank notes how far it has come, for the outcome of one that cannot report."""
    return scratch / f"rank-{rank}.phase"


class Rank:
    """One rank of a trial: its place in the world, and how far it has come."""

    def __init__(self, spec: TrialSpec, rank: int, local_rank: int, scratch: Path) -> None:
        self.spec = spec
        self.rank = rank
        self.scratch = scratch
        self.device = _device(spec, local_rank)
        self.meter: MemoryMeter | None = None
        self.stage = "start"
        self.trials_in_process = next(_trials_in_process)
        self.report = RankReport(rank=rank, outcome=Outcome.CRASHED)

    def enter(self, stage: str) -> None:
        """Note the stage on disk."""
        self.stage = stage
        phase_path(self.scratch, self.rank).write_text(stage)

    def update(self, **fields: object) -> None:
        """Add what is known now to the report."""
        self.report = msgspec.structs.replace(self.report, **fields)

    def write(self) -> None:
        """Write the report."""
        write_atomically(report_path(self.scratch, self.rank), to_json(self.report))


def _device(spec: TrialSpec, local_rank: int) -> torch.device:
    """Return a rank's device; over gloo ranks take turns on the GPUs that there are."""
    if spec.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count() if spec.run.backend == "gloo" else local_rank)


def run_rank(spec: TrialSpec, rank: int, local_rank: int, scratch: Path, launcher: str) -> int:
    """Run one rank; return the process's exit code. Its report is on disk before this returns."""
    this = Rank(spec, rank, local_rank, scratch)
    try:
        this.enter("start")
        _start(this, launcher)
        _measure(this)
        this.update(outcome=Outcome.OK)
        this.write()
    except BaseException as error:
        # Written before any further collective: the peers are still inside theirs.
        traceback.print_exc()
        _dump_snapshot(this)
        outcome, failure = classify(error, this.meter.current_phase if this.meter else this.stage)
        this.update(outcome=outcome, failure=failure, memory=_partial_memory(this))
        this.write()
        return 1
    _say_goodbye()
    return 0


def trace_path(scratch: Path, rank: int) -> Path:
    """Return where a rank keeps its last profiled step's trace."""
    return scratch / f"rank-{rank}.trace.json.gz"


def snapshot_path(scratch: Path, rank: int) -> Path:
    """Return where a rank keeps its allocations."""
    return scratch / f"rank-{rank}.snapshot.pickle"


def _dump_snapshot(this: Rank) -> None:
    """Write the allocations up to now, where they are recorded; what was written before is older, and goes."""
    if this.spec.keep_snapshot and torch.cuda.is_initialized():
        try:
            torch.cuda.memory._dump_snapshot(str(snapshot_path(this.scratch, this.rank)))
        except Exception:  # a broken context, a full disk: the trial's own outcome is what counts
            traceback.print_exc()


def _partial_memory(this: Rank) -> MemoryReading | None:
    try:
        return _own(this, this.meter.reading()) if this.meter is not None else None
    except RuntimeError:  # a CUDA context that an error has broken
        return None


def classify(error: BaseException, phase: str) -> tuple[Outcome, Failure]:
    """Tell which memory ran out, if one did, from the error that ended a rank."""
    text = " ".join(str(error).split()) or type(error).__name__
    message, summary = f"{type(error).__name__}: {text[:400]}", None
    if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in _OUT_OF_DEVICE_MEMORY):
        if torch.cuda.is_initialized():
            summary = torch.cuda.memory_summary(abbreviated=True)
        outcome, limit = Outcome.OOM_GPU, "device"
    elif isinstance(error, BudgetExceeded):
        outcome, limit = Outcome.OOM_HOST, "budget"
    elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or "std::bad_alloc" in text:
        outcome, limit = Outcome.OOM_HOST, "host"
    else:
        outcome, limit = Outcome.CRASHED, None
    return outcome, Failure(message=message, phase=phase, at=time.time(), limit=limit, allocator_summary=summary)


def _start(this: Rank, launcher: str) -> None:
    """Set threads and seeds, join the process group."""
    spec = this.spec
    warnings.filterwarnings("ignore", category=ShardsNothingWarning)  # a sweep compares with it on purpose
    threads = spec.run.threads_per_rank or max((os.cpu_count() or 1) // spec.num_processes, 1)
    torch.set_num_threads(threads)
    torch.manual_seed(spec.setup.seed)
    if this.device.type == "cuda":
        torch.cuda.set_device(this.device)
        torch.backends.cuda.enable_cudnn_sdp(spec.run.attention != "flash")
    if spec.keep_snapshot:
        # Python's stacks alone: naming C++ frames takes seconds, or fails where there is no addr2line.
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES, stacks="python")
    if spec.run.emulate:
        join_silent_world(this.rank, spec.setup.world_size)
    else:
        backend = _backend(this)
        dist.init_process_group(
            backend,
            store=meet(this.scratch, spec.id, spec.setup.world_size),
            rank=this.rank,
            world_size=spec.setup.world_size,
            device_id=this.device if "nccl" in backend else None,
        )
        if this.device.type == "cuda" and backend == "gloo":
            go_through_the_host()
    started = {"launcher": launcher, "trials_in_process": str(this.trials_in_process)}
    this.update(environment=_environment(this, threads) | started, device_name=_device_name(this.device))


def _backend(this: Rank) -> str:
    """Return the process group's backend: with offload, gradient norms are reduced on the host as well."""
    if this.device.type != "cuda" or this.spec.run.backend == "gloo":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if this.spec.setup.offload is Offload.PARAMS else "nccl"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.processor() or platform.machine())


def _environment(this: Rank, threads: int) -> dict[str, str]:
    environment = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "backend": dist.get_backend(),
        "threads_per_rank": str(threads),
    }
    if this.device.type == "cuda":
        environment["cuda"] = str(torch.version.cuda)
        environment["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        environment["allocator"] = os.environ.get(
            "PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "default")
        )
    return environment


def _prepare(this: Rank, meter: MemoryMeter) -> Training:
    """Build and wrap the model, make the optimizer."""
    spec, setup = this.spec, this.spec.setup
    model = fsdp(
        build(spec.model, DTYPES[setup.precision.store]),
        setup=setup,
        TransformerBlock=BLOCKS[spec.model.family],
        device=this.device,
        initialize=partial(initialize, seed=setup.seed),
    )
    if dist.get_backend() == "fake":
        silence(model, setup)
    return Training(
        model=model,
        optimizer=build_optimizer(model.parameters(), setup.optimizer, setup.learning_rate),
        loss_function=loss_function(setup.loss),
        setup=setup,
        device=this.device,
        meter=meter,
        scaler=build_scaler(setup, this.device),
    )


def _measure(this: Rank) -> None:
    """Warm up, measure, profile; everything seen goes into the report."""
    _measure_with_communication(this)
    run = this.spec.run
    if run.steps_without_communication and this.spec.setup.world_size > 1:
        this.enter(WITHOUT_COMMUNICATION)
        this.update(outcome=Outcome.OK)
        this.write()  # whatever happens now, the trial is measured
        _measure_without_communication(this)


def _batches(this: Rank, num_steps: int) -> Iterator[list[torch.Tensor]]:
    return batches(this.spec.setup, this.spec.model.vocab_size, num_steps, this.rank, this.spec.setup.world_size)


def _timed_step(training: Training, data: Iterator[list[torch.Tensor]]) -> float:
    """Run one step; return its seconds."""
    micro_batches = next(data)
    training.meter.phase("forward")  # the last optimizer ends here: what moves to the device is this step's
    _synchronize(training.device)
    begin = time.perf_counter()
    loss = train_step(training, micro_batches)
    _synchronize(training.device)
    seconds = time.perf_counter() - begin
    training.losses.append(float(loss))
    return seconds


def _measure_without_communication(this: Rank) -> None:
    """Time the same step where collectives end at once; a failure leaves that unknown, and says why."""
    setup, num_steps = this.spec.setup, this.spec.run.steps_without_communication
    try:
        enter_silent_world(this.rank, setup.world_size)
        training = _prepare(this, Unmetered())
        timed_step = partial(_timed_step, training, _batches(this, WARMUP_STEPS + num_steps))
        this.update(seconds_without_communication=time_steps(timed_step, num_steps))
    except Exception as error:
        traceback.print_exc()
        this.update(without_communication_failure=classify(error, this.stage)[1].message)


def _measure_with_communication(this: Rank) -> None:
    spec, run = this.spec, this.spec.run
    this.enter("load")
    this.meter = build_meter(this.device, run.memory_limit_bytes, spec.setup.compiles)
    training = _prepare(this, this.meter)
    this.meter.phase("forward")  # loading ends here: the first tokens are the step's
    data = _batches(this, run.warmup_steps + run.steps + run.communication_steps + 1)
    timed_step = partial(_timed_step, training, data)
    this.enter("warmup")
    warmup = [timed_step() for _ in range(run.warmup_steps)]
    training.meter.end_phases()
    this.update(
        warmup_seconds=tuple(warmup),
        effective=effective_setup(training.model, training.optimizer, training.gradient_dtypes or (), spec.setup),
    )
    this.enter("steps")
    dist.all_reduce(torch.zeros(1, device=this.device))  # not barrier(), which keeps a tensor on the device for good
    _synchronize(this.device)
    with TelemetrySampler(Nvml(this.device)) as sampler:
        seconds = [timed_step() for _ in range(run.steps)]
    this.update(
        step_seconds=tuple(seconds),
        losses=tuple(training.losses),
        telemetry=sampler.telemetry(),
        memory=_own(this, _memory(training)),
    )
    _dump_snapshot(this)
    if this.device.type == "cuda":
        this.update(environment={**this.report.environment, "attention": _attention_kernel(this)})
    this.enter("communication")
    if run.communication_steps:
        step = partial(_next_step, training, data)
        trace = trace_path(this.scratch, this.rank) if spec.keep_trace else None
        this.update(communication=measure_communication(step, this.device, run.communication_steps, trace))
    release(training.model)


def _attention_kernel(this: Rank) -> str:
    """Return which kernel the trial's attention ran, or why torch does not say: the trial is measured by now."""
    model, setup = this.spec.model, this.spec.setup
    heads, dtype = (model.num_attention_heads, model.num_key_value_heads), DTYPES[setup.precision.compute]
    try:
        return attention_kernel(*heads, setup.sequence_length, model.head_dim, dtype, this.device)
    except Exception as error:
        traceback.print_exc()
        return f"unknown: {type(error).__name__}"


def _next_step(training: Training, data: Iterator[list[torch.Tensor]]) -> None:
    train_step(training, next(data))


def _memory(training: Training) -> MemoryReading:
    """Return the meter's reading with what this rank keeps between steps."""
    return msgspec.structs.replace(
        training.meter.reading(),
        parameters_bytes=storage_bytes(map(local, training.model.parameters())),
        gradients_bytes=training.gradients_bytes,
        optimizer_state_bytes=storage_bytes(optimizer_states(training.optimizer)),
    )


def _own(this: Rank, reading: MemoryReading) -> MemoryReading:
    """Leave out the resident set of a process that ran other trials before."""
    return reading if this.trials_in_process == 1 else msgspec.structs.replace(reading, peak_host_bytes=None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _say_goodbye() -> None:
    """Leave together: a rank that closes its sockets early would fail the others' last collective."""
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        traceback.print_exc()  # the report is written; a peer that left first changes nothing
