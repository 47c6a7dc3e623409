"""One optimizer step, as in training scripts: forward, loss, backward, gradient clipping, optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Build the optimizer and, for fp16, the gradient scaler of a wrapped model; return what a step needs.

    Every rank must skip the same steps. FSDP1's shards need ShardedGradScaler for that; FSDP2's DTensors agree on
    overflows by themselves (torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler), DDP's gradients are
    equal on all ranks.
    """
    scaler = ShardedGradScaler if setup.api is Api.FSDP1 else torch.amp.GradScaler
    return Training(
        model=model,
        optimizer=optimizer_of(model, setup),
        loss_function=loss_function,
        setup=setup,
        device=device,
        meter=meter,
        scaler=scaler(device=device.type) if setup.precision.needs_grad_scaler else None,
    )


def train_step(training: Training, micro_batches: list[Tensor]) -> Tensor:
    """Run one step over micro-batches B, S + 1; return this rank's mean loss as a tensor on the device."""
    total = torch.zeros((), device=training.device)
    for index, tokens in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with gradient_sync(training.model, training.setup.sync_every_micro_batch or is_last):
            total += _train_on(training, tokens.to(training.device), len(micro_batches))
    optimizer_step(training)
    return total


def _train_on(training: Training, tokens: Tensor, num_micro_batches: int) -> Tensor:
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    given = (inputs, targets) if training.setup.loss.includes_head else (inputs,)
    return forward_backward(training, lambda: training.model(*given), targets, num_micro_batches)


def forward_backward(training: Training, forward: Callable[[], Any], targets: Any, num_micro_batches: int) -> Tensor:
    """Run forward and backward of one micro-batch; return its part of the step's mean loss.

    ``forward`` runs the model; the loss function is given what it returns, and ``targets``.
    """
    training.meter.phase("forward")
    output = forward()
    training.meter.phase("loss")
    loss = training.loss_function(output, targets) / num_micro_batches
    del output
    training.meter.phase("backward")
    (training.scaler.scale(loss) if training.scaler is not None else loss).backward()
    return loss.detach()


def optimizer_step(training: Training) -> None:
    """Unscale, clip, step, and free the gradients; nothing of it where backward has stepped already.

    In the first step, note the dtypes and bytes of the gradients.
    """
    training.meter.phase("optimizer")
    if training.gradient_dtypes is None:
        training.gradient_dtypes = dtype_names(gradients(training.model))
        training.gradients_bytes = storage_bytes(gradients(training.model))
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


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Let backward reduce gradients inside a ``with`` block, or keep them unsharded (``no_sync``)."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
        model.set_requires_gradient_sync(True)
    elif not enabled and isinstance(model, FullyShardedDataParallel | DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield
