"""WrapPlan: what fsdp() has decided, for the three wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_bench.spec.setup import TrainSetup

Initializer = Callable[[torch.Tensor, str], None]
"""Fills one whole parameter, given its name in the bare model."""


@dataclass(frozen=True)
class WrapPlan:
    """Everything that a wrapper needs to know; it makes no choices of its own."""

    setup: TrainSetup
    units: tuple[nn.Module, ...]
    """Modules to wrap below the root, children before parents."""
    device: torch.device
    mesh: DeviceMesh | None
    process_group: dist.ProcessGroup | None
    initialize: Initializer | None
    module_names: dict[nn.Module, str]
    """Each module's name in the bare model, before any wrapper renamed it."""

    def initializer_for(self, model: nn.Module) -> Initializer | None:
        """Return what fills the parameters of a model that is on the meta device; None for one that is filled."""
        return self.initialize if any(parameter.is_meta for parameter in model.parameters()) else None

    def name_of(self, module: nn.Module, parameter_name: str) -> str:
        """Return a parameter's name in the bare model."""
        prefix = self.module_names.get(module, "")
        return f"{prefix}.{parameter_name}" if prefix else parameter_name

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters as they are now, whatever wrapped them, with their names in the bare model."""
        for module in self.module_names:
            for name, parameter in module.named_parameters(recurse=False):
                yield self.name_of(module, name), parameter
