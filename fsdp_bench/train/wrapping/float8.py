"""Linear layers that compute in float8: torchao's Float8Linear in the place of those of the blocks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_bench.spec.errors import MachineError, install_hint
from fsdp_bench.spec.setup import Float8


def convert_to_float8(blocks: Iterable[nn.Module], recipe: Float8) -> None:
    """Replace the linear layers of blocks in place, as torchtitan does before checkpointing, compiling and sharding.

    The parameters stay the same. Nothing happens for ``Float8.NONE``.

    Raises:
        MachineError: if torchao is not installed.
    """
    if recipe is Float8.NONE:
        return
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise MachineError(f"float8 needs torchao: {install_hint('torchao')}") from None
    config = Float8LinearConfig.from_recipe_name(recipe.value)
    for block in blocks:
        convert_to_float8_training(block, config=config)
