"""Measures one trial on one rank: load, warm-up, measured steps, profiled steps. Results go into the report."""

from __future__ import annotations

import time
import traceback
from contextlib import nullcontext
from functools import partial

import msgspec
import torch
import torch.distributed as dist

from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import MemoryReading, Outcome
from fsdp_bench.spec.record import WITHOUT_COMMUNICATION
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.measuring.communication import measure_communication
from fsdp_bench.train.measuring.fake_group import (
    WARMUP_STEPS,
    add_finished_hook,
    replace_group_by_fake,
    time_steps,
)
from fsdp_bench.train.measuring.meters import MemoryMeter, Unmetered, build_meter
from fsdp_bench.train.measuring.nvml import Nvml, TelemetrySampler
from fsdp_bench.train.models.attention_kernel import attention_kernel
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.optimizer import optimizer_of
from fsdp_bench.train.processes.exception_to_outcome import classify
from fsdp_bench.train.processes.rank import Rank, dump_snapshot, trace_path
from fsdp_bench.train.processes.subject import RankModel, subject_of
from fsdp_bench.train.step import Training, build_scaler
from fsdp_bench.train.wrapping.fsdp1 import release
from fsdp_bench.train.wrapping.readback import effective_setup, local, optimizer_states, storage_bytes
from fsdp_bench.train.wrapping.wrap import fsdp


def measure(this: Rank) -> None:
    """Warm up, measure and profile; add all readings to the report."""
    has_no_values = this.spec.run.rehearsed_on is not None and isinstance(this.spec.model, ModelCode)
    with unpacked_sequences() if has_no_values else nullcontext():  # values would say that they are not packed
        _measure_with_communication(this)
    run = this.spec.run
    if run.steps_without_communication and this.spec.setup.world_size > 1:
        this.enter(WITHOUT_COMMUNICATION)
        this.update(outcome=Outcome.OK)
        this.write()  # whatever happens now, the trial is measured
        _measure_without_communication(this)


def _measure_with_communication(this: Rank) -> None:
    spec, run = this.spec, this.spec.run
    this.enter("load")
    this.meter = build_meter(this.device, run.memory_limit_bytes, _is_compiled(spec.setup))
    subject, training = _prepare(this, this.meter, run.warmup_steps + run.steps + run.communication_steps + 1)
    this.meter.phase("forward")  # loading ends here: the first tokens are the step's
    timed_step = partial(_timed_step, training, subject)
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
        memory=_memory(training),
    )
    dump_snapshot(this)
    if this.device.type == "cuda":
        this.update(environment={**this.report.environment, "attention": _attention_kernel(this)})
    this.enter("communication")
    if run.communication_steps:
        step = partial(_next_step, training, subject)
        trace = trace_path(this.scratch, this.rank) if spec.keep_trace else None
        this.update(communication=measure_communication(step, this.device, run.communication_steps, trace))
    release(training.model)


def _measure_without_communication(this: Rank) -> None:
    """Time the same step with collectives that end at once. If it fails, the report says why."""
    setup, num_steps = this.spec.setup, this.spec.run.steps_without_communication
    try:
        replace_group_by_fake(this.rank, setup.world_size)
        subject, training = _prepare(this, Unmetered(), WARMUP_STEPS + num_steps)
        timed_step = partial(_timed_step, training, subject)
        this.update(seconds_without_communication=time_steps(timed_step, num_steps))
    except Exception as error:
        traceback.print_exc()
        this.update(without_communication_failure=classify(error, this.stage)[1].message)


def _is_compiled(setup: TrainSetup) -> bool:
    return setup.compiles or setup.compiles_optimizer


def _prepare(this: Rank, meter: MemoryMeter, num_steps: int) -> tuple[RankModel, Training]:
    """Build and wrap the model, build the optimizer."""
    setup = this.spec.setup
    subject = subject_of(this.spec, this.rank, this.device, num_steps)
    model = fsdp(
        subject.model,
        setup=setup,
        TransformerBlock=subject.block,
        device=this.device,
        initialize=subject.initialize,
    )
    if dist.get_backend() == "fake":
        add_finished_hook(model, setup)
    training = Training(
        model=model,
        optimizer=optimizer_of(model, setup),
        loss_function=subject.loss_function,
        setup=setup,
        device=this.device,
        meter=meter,
        scaler=build_scaler(setup, this.device),
    )
    return subject, training


def _timed_step(training: Training, subject: RankModel) -> float:
    """Run one step; return its seconds."""
    micro_batches = next(subject.batches)
    training.meter.phase("forward")  # the last optimizer ends here: what moves to the device is this step's
    _synchronize(training.device)
    begin = time.perf_counter()
    loss = subject.step(training, micro_batches)
    _synchronize(training.device)
    seconds = time.perf_counter() - begin
    training.losses.append(float(loss.sum()))
    return seconds


def _next_step(training: Training, subject: RankModel) -> None:
    subject.step(training, next(subject.batches))


def _memory(training: Training) -> MemoryReading:
    """Return the meter's reading with the bytes of this rank's parameters, gradients and optimizer states."""
    return msgspec.structs.replace(
        training.meter.reading(),
        parameters_bytes=storage_bytes(map(local, training.model.parameters())),
        gradients_bytes=training.gradients_bytes,
        optimizer_state_bytes=storage_bytes(optimizer_states(training.optimizer)),
    )


def _attention_kernel(this: Rank) -> str:
    """Return the kernel of the trial's attention, or why torch does not say; it must not fail a measured trial."""
    model, setup = this.spec.model, this.spec.setup
    if isinstance(model, ModelCode):
        return "unknown: the model's own code chooses"
    heads, dtype = (model.num_attention_heads, model.num_key_value_heads), DTYPES[setup.precision.compute]
    try:
        return attention_kernel(*heads, setup.sequence_length, model.head_dim, dtype, this.device)
    except Exception as error:
        traceback.print_exc()
        return f"unknown: {type(error).__name__}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
