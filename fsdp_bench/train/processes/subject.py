"""The subject of a trial on one rank: its model, batches, loss and step; of the benchmark or of other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_bench.rehearse.inside.replace.integers import compute_small_integers
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.record import TrialSpec
from fsdp_bench.spec.setup import Loss
from fsdp_bench.train.models.causal_loss import replace_loss
from fsdp_bench.train.models.data import batches
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.loss import LossFunction, head_loss, loss_function
from fsdp_bench.train.models.model_code import build_code
from fsdp_bench.train.models.transformer import BLOCKS, build, initialize
from fsdp_bench.train.models.user_module import loss_of, module_step
from fsdp_bench.train.step import Training, train_step
from fsdp_bench.train.wrapping.wrap_plan import Initializer


@dataclass(frozen=True)
class RankModel:
    """The model that one rank trains."""

    model: nn.Module
    """The bare model: on the meta device if there is ``initialize``, else in host memory."""
    block: type[nn.Module] | None
    batches: Iterator[list[Any]]
    """For each step the micro-batches, in host memory."""
    loss_function: LossFunction
    step: Callable[[Training, list[Any]], Tensor]
    """Runs one step; returns parts of this rank's mean loss, which add up when the device has done its work."""
    initialize: Initializer | None = None


def subject_of(spec: TrialSpec, rank: int, device: torch.device, num_steps: int) -> RankModel:
    """Build what a rank trains for so many steps."""
    setup = spec.setup
    if setup.loss.is_fused and spec.run.rehearsed_on is not None:
        _compute_integers_once()
    if isinstance(spec.model, ModelCode):
        without_data = spec.run.rehearsed_on is not None
        built = build_code(spec.model, setup, rank, num_steps, device, without_data)
        losses = torch.zeros(setup.gradient_accumulation_steps, pin_memory=device.type == "cuda")
        loss = loss_of if setup.loss is Loss.PLAIN else replace_loss(built.model, setup.loss)
        return RankModel(built.model, built.block, built.batches, loss, partial(_step_of_code, losses))
    return RankModel(
        model=build(spec.model, DTYPES[setup.precision.store], head_loss(setup.loss)),
        block=BLOCKS[spec.model.family],
        batches=batches(setup, spec.model.vocab_size, num_steps, rank, setup.world_size),
        loss_function=loss_function(setup.loss),
        step=train_step,
        initialize=partial(initialize, seed=setup.seed),
    )


@cache
def _compute_integers_once() -> None:
    """Let targets in a rehearsal be what they are in training: Liger's losses assert it."""
    compute_small_integers()


def _step_of_code(losses: Tensor, training: Training, micro_batches: list[Any]) -> Tensor:
    module_step(training, micro_batches, losses)
    return losses
