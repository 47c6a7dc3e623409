"""Finds the blocks of a bare model: which class they have, and the lists that hold them."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from fsdp_bench.spec.errors import SpecError


def block_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a model's blocks: as transformers names it, else that of the largest list of modules.

    Raises:
        SpecError: if the model holds no list of modules of one class.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    sizes: dict[type[nn.Module], int] = defaultdict(int)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                sizes[type(block)] += sum(parameter.numel() for parameter in block.parameters())
    chosen = {kind: size for kind, size in sizes.items() if kind.__name__ in named} or sizes
    if not chosen:
        raise SpecError("the model has no nn.ModuleList of blocks; say which class they are: --transformer-block")
    return max(chosen, key=lambda kind: chosen[kind])


def named_class(model: nn.Module, path: str) -> type[nn.Module]:
    """Return the class ``pkg.mod:Class`` of a model's blocks.

    Raises:
        SpecError: if the model has no such module.
    """
    name = path.rpartition(":")[2].rpartition(".")[2]
    found = next((type(module) for module in model.modules() if type(module).__name__ == name), None)
    if found is None:
        raise SpecError(f"transformer-block: the model has no module of the class {path}")
    return found


def block_lists(model: nn.Module, kind: type[nn.Module]) -> dict[str, int]:
    """Return the names of the lists that hold blocks, each with how many."""
    counts: dict[str, int] = defaultdict(int)
    for name, module in model.named_modules():
        found = re.fullmatch(r"(.+)\.(\d+)", name)
        if isinstance(module, kind) and found:
            counts[found[1]] += 1
    return dict(counts)
