"""One optimizer step, as in training scripts: forward, loss, backward, gradient clipping, optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from fsdp_bench.spec.setup import Api, TrainSetup
from fsdp_bench.train.measuring.meters import MemoryMeter
from fsdp_bench.train.models.dtypes import dtype_names
from fsdp_bench.train.models.loss import LossFunction
from fsdp_bench.train.models.optimizer import optimizer_of
from fsdp_bench.train.wrapping.readback import gradients, storage_bytes


@dataclass
class Training:
    """A wrapped model with its optimizer, loss function and other parts of a training step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_function: LossFunction
    setup: TrainSetup
    device: torch.device
    meter: MemoryMeter
    scaler: torch.amp.GradScaler | None = None
    gradient_dtypes: tuple[str, ...] | None = None
    """The dtypes of the gradients in the first step, before the optimizer's step."""
    gradients_bytes: int = 0
    losses: list[float] = field(default_factory=list)


def prepared(
    model: nn.Module, loss_function: LossFunction, setup: TrainSetup, device: torch.device, meter: MemoryMeter
) -> Training:
    """Build the optimizer and the gradient scaler of a wrapped model; return what a step needs."""
    return Training(
        model=model,
        optimizer=optimizer_of(model, setup),
        loss_function=loss_function,
        setup=setup,
        device=device,
        meter=meter,
        scaler=build_scaler(setup, device),
    )


def build_scaler(setup: TrainSetup, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the gradient scaler for fp16. None for other precisions.

    Every rank must skip the same steps. FSDP1's shards need ShardedGradScaler for that; FSDP2's DTensors agree on
    overflows by themselves (torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler), DDP's gradients are
    equal on all ranks.
    """
    if not setup.precision.needs_grad_scaler:
        return None
    return (ShardedGradScaler if setup.api is Api.FSDP1 else torch.amp.GradScaler)(device=device.type)


def train_step(training: Training, micro_batches: list[Tensor]) -> Tensor:
    """Run one step over micro-batches B, S + 1; return this rank's mean loss as a tensor on the device."""
    setup, meter = training.setup, training.meter
    total = torch.zeros((), device=training.device)
    for index, tokens in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with gradient_sync(training.model, setup.sync_every_micro_batch or is_last):
            total += _forward_backward(training, tokens.to(training.device), len(micro_batches))
    meter.phase("optimizer")
    note_gradients(training)
    optimizer_step(training)
    return total


def note_gradients(training: Training) -> None:
    """Note the dtypes and bytes of the gradients, in the first step."""
    if training.gradient_dtypes is None:
        training.gradient_dtypes = dtype_names(gradients(training.model))
        training.gradients_bytes = storage_bytes(gradients(training.model))


def _forward_backward(training: Training, tokens: Tensor, num_micro_batches: int) -> Tensor:
    """Run forward and backward of one micro-batch; return its part of the step's mean loss."""
    meter = training.meter
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    meter.phase("forward")
    includes_head = training.setup.loss.includes_head
    logits = training.model(inputs, targets) if includes_head else training.model(inputs)
    meter.phase("loss")
    loss = training.loss_function(logits, targets) / num_micro_batches
    del logits
    meter.phase("backward")
    scaled = training.scaler.scale(loss) if training.scaler is not None else loss
    scaled.backward()
    return loss.detach()


def optimizer_step(training: Training) -> None:
    """Unscale, clip, step, and free the gradients; nothing of it where backward has stepped already."""
    if training.setup.optimizer_in_backward:
        return
    setup, scaler, optimizer = training.setup, training.scaler, training.optimizer
    if scaler is not None:
        scaler.unscale_(optimizer)
    if setup.max_grad_norm is not None:
        clip_gradients(training.model, setup.max_grad_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale all gradients so that their norm over every rank's shards is at most ``max_norm``."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(max_norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class _Fsdp2Sync:
    def __init__(self, model: FSDPModule, enabled: bool) -> None:
        self._model, self._enabled = model, enabled

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(self._enabled)

    def __exit__(self, *exception: object) -> None:
        self._model.set_requires_gradient_sync(True)


def gradient_sync(model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context manager in which backward reduces gradients, or keeps them unsharded (``no_sync``)."""
    if isinstance(model, FSDPModule):
        return _Fsdp2Sync(model, enabled)
    if not enabled and isinstance(model, FullyShardedDataParallel | DistributedDataParallel):
        return model.no_sync()
    return nullcontext()
