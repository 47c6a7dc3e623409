"""WrapPlan: the decisions of fsdp(), for the three wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_bench.spec.setup import Precision, TrainSetup

Initializer = Callable[[torch.Tensor, str], None]
"""Fills one whole parameter in place, given the parameter and its name in the bare model."""


@dataclass(frozen=True)
class WrappedUnit:
    """One FSDP unit below the root."""

    modules: tuple[nn.Module, ...]
    """One module, or several that fully_shard makes one unit of: ``fully_shard([norm, head])``."""
    precision: Precision
    stays_gathered: bool = False
    """Whether fully_shard is given reshard_after_forward=False for this unit, whatever the strategy."""


@dataclass(frozen=True)
class WrapPlan:
    """All decisions that a wrapper needs; the wrapper makes none of its own."""

    setup: TrainSetup
    units: tuple[WrappedUnit, ...]
    """Units below the root, children before parents; with the model's ends in the order in which they run."""
    device: torch.device
    mesh: DeviceMesh | None
    process_group: dist.ProcessGroup | None
    initialize: Initializer | None
    module_names: dict[nn.Module, str]
    """The name of each module in the bare model, before wrappers renamed it."""

    def initializer_for(self, model: nn.Module) -> Initializer | None:
        """Return the function that fills the parameters of a model on the meta device; None for other models."""
        return self.initialize if any(parameter.is_meta for parameter in model.parameters()) else None

    def name_of(self, module: nn.Module, parameter_name: str) -> str:
        """Return a parameter's name in the bare model."""
        prefix = self.module_names.get(module, "")
        return f"{prefix}.{parameter_name}" if prefix else parameter_name

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the current parameters, wrapped or not, with their names in the bare model."""
        for module in self.module_names:
            for name, parameter in module.named_parameters(recurse=False):
                yield self.name_of(module, name), parameter
