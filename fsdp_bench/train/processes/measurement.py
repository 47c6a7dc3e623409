"""Measures one trial on one rank: what it trains, load, warm-up, measured and profiled steps. The report has it all."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_bench.rehearse.inside.replace.integers import compute_small_integers
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import MemoryReading, Outcome
from fsdp_bench.spec.record import WITHOUT_COMMUNICATION, TrialSpec
from fsdp_bench.spec.setup import Loss, TrainSetup
from fsdp_bench.train.measuring.communication import measure_communication
from fsdp_bench.train.measuring.fake_group import WARMUP_STEPS, add_finished_hook, replace_group_by_fake
from fsdp_bench.train.measuring.meters import MemoryMeter, Nvml, TelemetrySampler, build_meter
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.loss import head_loss, loss_function
from fsdp_bench.train.models.model_code import build_code, replace_loss
from fsdp_bench.train.models.transformer import BLOCKS, attention_kernel, batches, build, initialize
from fsdp_bench.train.models.user_module import loss_of, module_step
from fsdp_bench.train.processes.rank import Rank, classify, dump_snapshot
from fsdp_bench.train.step import Training, prepared, train_step
from fsdp_bench.train.wrapping.readback import effective_setup, local, optimizer_states, storage_bytes
from fsdp_bench.train.wrapping.units import Initializer
from fsdp_bench.train.wrapping.wrap import fsdp
from fsdp_bench.train.wrapping.wrappers import release


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
    is_compiled = spec.setup.compiles or spec.setup.compiles_optimizer
    this.meter = build_meter(this.device, run.memory_limit_bytes, is_compiled)
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
        trace = this.file("trace.json.gz") if spec.keep_trace else None
        readings = measure_communication(
            lambda: subject.step(training, next(subject.batches)), this.device, run.communication_steps, trace
        )
        this.update(communication=readings)
    release(training.model)


def _measure_without_communication(this: Rank) -> None:
    """Time the same step with collectives that end at once. If it fails, the report says why."""
    setup, num_steps = this.spec.setup, this.spec.run.steps_without_communication
    try:
        replace_group_by_fake(this.rank, setup.world_size)
        subject, training = _prepare(this, MemoryMeter(), WARMUP_STEPS + num_steps)
        seconds = [_timed_step(training, subject) for _ in range(WARMUP_STEPS + num_steps)]
        this.update(seconds_without_communication=tuple(seconds[WARMUP_STEPS:]))
    except Exception as error:
        traceback.print_exc()
        this.update(without_communication_failure=classify(error, this.stage)[1].message)


def _prepare(this: Rank, meter: MemoryMeter, num_steps: int) -> "tuple[RankModel, Training]":
    subject = subject_of(this.spec, this.rank, this.device, num_steps)
    return subject, subject.wrapped(this.spec.setup, this.device, meter)


def _timed_step(training: Training, subject: "RankModel") -> float:
    micro_batches = next(subject.batches)
    training.meter.phase("forward")  # the last optimizer ends here: what moves to the device is this step's
    _synchronize(training.device)
    begin = time.perf_counter()
    loss = subject.step(training, micro_batches)
    _synchronize(training.device)
    seconds = time.perf_counter() - begin
    training.losses.append(float(loss.sum()))
    return seconds


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


@dataclass(frozen=True)
class RankModel:
    """The model that one rank trains."""

    model: nn.Module
    """The bare model: on the meta device if there is ``initialize``, else in host memory."""
    block: type[nn.Module] | None
    batches: Iterator[list[Any]]
    """For each step the micro-batches, in host memory."""
    loss_function: Callable[[Any, Any], Tensor]
    step: Callable[[Training, list[Any]], Any]
    """Runs one step; returns parts of this rank's mean loss, which add up when the device has done its work."""
    initialize: Initializer | None = None
    """Fills the parameters of a model that is on the meta device."""

    def wrapped(
        self, setup: TrainSetup, device: torch.device, meter: MemoryMeter, device_mesh: DeviceMesh | None = None
    ) -> Training:
        """Wrap the model, and build what trains it."""
        model = fsdp(
            self.model,
            setup=setup,
            TransformerBlock=self.block,
            device=device,
            device_mesh=device_mesh,
            initialize=self.initialize,
        )
        if dist.get_backend() == "fake":
            add_finished_hook(model, setup)
        return prepared(model, self.loss_function, setup, device, meter)


def subject_of(spec: TrialSpec, rank: int, device: torch.device, num_steps: int) -> RankModel:
    """Build what a rank trains for so many steps."""
    setup = spec.setup
    if setup.loss.is_fused and spec.run.rehearsed_on is not None:
        compute_small_integers()  # targets are what they are in training: Liger's losses assert it
    if isinstance(spec.model, ModelCode):
        without_data = spec.run.rehearsed_on is not None
        model, block, code_batches = build_code(spec.model, setup, rank, num_steps, device, without_data)
        losses = torch.zeros(setup.gradient_accumulation_steps, pin_memory=device.type == "cuda")
        loss = loss_of if setup.loss is Loss.PLAIN else replace_loss(model, setup.loss)

        def step(training: Training, micro_batches: list[Any]) -> Tensor:
            module_step(training, micro_batches, losses)
            return losses

        return RankModel(model, block, code_batches, loss, step)
    return RankModel(
        model=build(spec.model, DTYPES[setup.precision.store], head_loss(setup.loss)),
        block=BLOCKS[spec.model.family],
        batches=batches(setup, spec.model.vocab_size, num_steps, rank, setup.world_size),
        loss_function=loss_function(setup.loss),
        step=train_step,
        initialize=partial(initialize, seed=setup.seed),
    )
