"""The modules that become FSDP units, by one rule for FSDP1 and FSDP2, and the plan by which a model is wrapped."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from fsdp_bench.spec.errors import WrapError
from fsdp_bench.spec.impossible import TIED_ENDS
from fsdp_bench.spec.recording.recorded import NO_ENDS, find_ends
from fsdp_bench.spec.setup import Api, Precision, TrainSetup

Policy = Callable[..., bool]
"""torch's auto-wrap policy: called with ``module``, ``recurse`` and ``nonwrapped_numel``."""


BlockClasses = type[nn.Module] | tuple[type[nn.Module], ...]


def units_by_class(model: nn.Module, classes: BlockClasses) -> list[nn.Module]:
    """Return every module of the given classes below the root, children before parents."""
    found = [module for module in model.modules() if module is not model and isinstance(module, classes)]
    return found[::-1]


def units_by_policy(model: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the modules that FSDP1's own recursion wraps, which is given a wrapper that only notes them."""
    units: list[nn.Module] = []

    def note(module: nn.Module, **_overrides: object) -> nn.Module:
        units.append(module)
        return module

    _recursive_wrap(model, policy, note, ignored_modules=set(), ignored_params=set(), only_wrap_children=True)
    return units


def units_by_size(model: nn.Module, min_num_params: int, kept_in_root: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return the subtrees with at least ``min_num_params`` parameters, not counting units below them.

    ``kept_in_root`` are modules whose parameters are also read elsewhere, such as a tied embedding. If they were units,
    their parameters would be freed before the second use. torch's default threshold is 100M.
    """
    kept = set(kept_in_root)
    by_size = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return (recurse or module not in kept) and by_size(module, recurse, nonwrapped_numel)

    return units_by_policy(model, policy)


def trained_leaves(model: nn.Module) -> list[nn.Module]:
    """Return the modules without children whose weight is trained (peft.utils.other.fsdp_auto_wrap_policy)."""
    leaves = (module for module in model.modules() if not list(module.children()))
    return [leaf for leaf in leaves if (weight := getattr(leaf, "weight", None)) is not None and weight.requires_grad]


def ends(
    model: nn.Module, api: Api, blocks: Collection[nn.Module]
) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """Return the modules of the unit before the blocks and of the one after them; FSDP1 wraps one module of each.

    A model says which these are, or they are a decoder's (spec/recording/recorded.py). Raises WrapError for a model of
    which neither is so, or whose head is the embedding.
    """
    before, after = getattr(model, "modules_before_blocks", ()), getattr(model, "modules_after_blocks", ())
    if not before or not after:
        before, after = _found_ends(model, blocks)
    if getattr(model, "modules_read_by_root", ()):
        raise WrapError(TIED_ENDS)
    return (before[:1], after[-1:]) if api is Api.FSDP1 else (tuple(before), tuple(after))


def _found_ends(model: nn.Module, blocks: Collection[nn.Module]) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    modules = dict(model.named_modules())
    lists = {name.rpartition(".")[0] for name, module in modules.items() if module in blocks}
    seen: set[nn.Parameter] = set()
    own = []
    for name, module in modules.items():
        parameters = [p for p in module._parameters.values() if p is not None and p not in seen]
        seen.update(parameters)
        own.append((name, [tuple(parameter.shape) for parameter in parameters]))
    found = find_ends(own, lists)
    if found is None:
        raise WrapError(
            f"{NO_ENDS}; or give {type(model).__name__} the properties modules_before_blocks and modules_after_blocks,"
            " two tuples of modules in the order of forward"
        )
    before, after = (tuple(modules[name] for name in names) for names in found)
    return before, after


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
