"""The optimizers of the benchmark, from torch.optim and torchao.optim."""

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_bench.spec.errors import MachineError, install_hint
from fsdp_bench.spec.setup import Offload, OptimizerKind, TrainSetup


def optimizer_of(model: nn.Module, setup: TrainSetup) -> torch.optim.Optimizer:
    """Build the optimizer of a model that is already wrapped."""
    if setup.optimizer_in_backward:
        return _InBackward(model, setup)
    if setup.offload is Offload.OPTIMIZER:
        return _offloaded(model, setup)
    return build_optimizer(model.parameters(), setup.optimizer, setup.learning_rate)


def build_optimizer(
    parameters: Iterable[nn.Parameter], kind: OptimizerKind, learning_rate: float
) -> torch.optim.Optimizer:
    """Build an optimizer of parameters that are already wrapped."""
    if kind is OptimizerKind.SGD:
        return torch.optim.SGD(parameters, lr=learning_rate, foreach=True)
    if kind is OptimizerKind.ADAFACTOR:
        return torch.optim.Adafactor(parameters, lr=learning_rate)
    if kind is OptimizerKind.ADAMW_8BIT:
        return _torchao("adamw-8bit").AdamW8bit(parameters, lr=learning_rate)
    if kind is OptimizerKind.MUON:
        return _muon(parameters, learning_rate)
    assert kind.is_adamw_of_torch, kind
    return torch.optim.AdamW(parameters, lr=learning_rate, **_implementation(kind))


def _implementation(kind: OptimizerKind) -> dict[str, Any]:
    return {"foreach": kind is OptimizerKind.ADAMW_FOREACH, "fused": kind is OptimizerKind.ADAMW_FUSED}


def _offloaded(model: nn.Module, setup: TrainSetup) -> torch.optim.Optimizer:
    """Build torchao's CPUOffloadOptimizer; its ``state`` is that of the optimizer on the GPU, of small parameters."""

    def state(optimizer: Any) -> Any:
        return {} if optimizer.d_opt is None else optimizer.d_opt.state

    base = _torchao("offload optimizer").CPUOffloadOptimizer
    with_state = type("CPUOffloadOptimizer", (base,), {"state": property(state)})
    optimizer: torch.optim.Optimizer = with_state(
        model.parameters(), torch.optim.AdamW, lr=setup.learning_rate, **_implementation(setup.optimizer)
    )
    return optimizer


def _torchao(setting: str) -> Any:
    """Return torchao.optim. Raises MachineError if torchao is not installed."""
    try:
        return importlib.import_module("torchao.optim")
    except ImportError:
        raise MachineError(f"{setting} needs torchao: {install_hint('torchao')}") from None


class _Several(torch.optim.Optimizer):
    """Several optimizers that step one after another."""

    def __init__(self, each: list[torch.optim.Optimizer]) -> None:
        self._each = each

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._each:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self._each:
            one.zero_grad(set_to_none)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for one in self._each for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {parameter: state for one in self._each for parameter, state in one.state.items()}


def _muon(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    every = list(parameters)
    matrices, others = ([each for each in every if (each.ndim == 2) is of_matrices] for of_matrices in (True, False))
    muon = [torch.optim.Muon(matrices, lr=learning_rate)] if matrices else []
    return _Several([*muon, *([torch.optim.AdamW(others, lr=learning_rate, foreach=True)] if others else [])])


class _InBackward(_Several):
    """One optimizer a parameter, called in backward when its gradient is reduced; frees the gradient.

    fully_shard calls the hooks of register_post_accumulate_grad_hook after it has reduced. FullyShardedDataParallel
    calls the optimizers in a parameter's ``_in_backward_optimizers``, where torch's _apply_optimizer_in_backward puts
    them; that function cannot be used after wrapping, because it also hooks the accumulation of unreduced gradients.
    """

    def __init__(self, model: nn.Module, setup: TrainSetup) -> None:
        super().__init__([])
        for parameter in (each for each in model.parameters() if each.requires_grad):
            optimizer = build_optimizer([parameter], setup.optimizer, setup.learning_rate)
            self._each.append(optimizer)
            if isinstance(model, FullyShardedDataParallel):
                parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]
            else:
                parameter.register_post_accumulate_grad_hook(partial(_step, optimizer))


def _step(optimizer: torch.optim.Optimizer, _parameter: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
