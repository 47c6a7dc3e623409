"""The tensors that activation checkpointing saves: which operators' outputs, and which blocks it leaves as they are.

checkpointing  policy                what is saved
selective      absent                outputs of all matrix products and of attention
every-second-product  torchtitan's: outputs of attention, of every other aten.mm, from the first on, and of aten.max
                      of whole tensors, which float8 scales by
aten.mm,aten.silu     outputs of the operators that are named
full           absent                the inputs of each block
every-2-blocks        blocks 0, 2, 4, ... as above; the blocks between them are not checkpointed
"""

import re
from functools import lru_cache

import msgspec

from fsdp_bench.spec.errors import SpecError, nearest, shown

EVERY_SECOND_PRODUCT = "every-second-product"
_EVERY_BLOCKS = re.compile(r"every-(\d{1,6})-blocks")

ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm")
POINTWISE = ("aten.add", "aten.mul", "aten.neg", "aten.cat", "aten.silu", "aten.gelu", "aten._to_copy")
NORMS = ("aten.native_layer_norm",)
OPERATORS = (*PRODUCTS, *ATTENTION, *NORMS, *POINTWISE)
"""The operators that a policy can name: all of the benchmark models' blocks that return a new tensor, except RMSNorm
(of a CPU's its multiplications and casts can be named), padding, and copies that change a layout.

aten._fused_rms_norm, CUDA's RMSNorm, is left out because a dry run replaces it (train/dry_run/fused_kernels.py)."""


class CheckpointingPolicy(msgspec.Struct, frozen=True):
    """A policy that was read."""

    saved: tuple[str, ...] = (*PRODUCTS, *ATTENTION)
    """Operators whose outputs are saved in a block of which only some are, by torch's names and for all overloads."""
    recomputes_every_second_product: bool = False
    """Whether of a block's aten.mm the second, fourth, ... are recomputed all the same."""
    every_blocks: int = 1
    """Block i is checkpointed if i is a multiple of this."""

    @property
    def is_of_blocks(self) -> bool:
        """Whether it chooses blocks, not operators."""
        return self.every_blocks > 1

    def saves(self, operator: str, num_products: int) -> bool:
        """Return whether an operator's output is saved; of a block's aten.mm that of the so manieth, from 1."""
        if operator == "aten.mm" and self.recomputes_every_second_product:
            return num_products % 2 == 1
        return operator in self.saved


@lru_cache(maxsize=256)
def read_policy(text: str | None) -> CheckpointingPolicy:
    """Read a policy; None is the default. Raises SpecError, naming the policies or the nearest operator."""
    if text is None:
        return CheckpointingPolicy()
    folded = text.strip().lower()
    if folded == EVERY_SECOND_PRODUCT:
        # torchtitan 0.2.2, distributed/activation_checkpoint.py: _get_custom_policy; its list, which has no aten.addmm,
        # in models/llama3/infra/parallelize.py. torchao's products in float8 are aten.mm of tensors with their scales.
        return CheckpointingPolicy(("aten.mm", *ATTENTION, "aten.max"), recomputes_every_second_product=True)
    if (found := _EVERY_BLOCKS.fullmatch(folded)) is not None and int(found[1]) > 1:
        return CheckpointingPolicy(every_blocks=int(found[1]))
    names = {word.strip().replace("::", ".") for word in folded.split(",")}
    unknown = sorted(names - set(OPERATORS))
    if not unknown:
        return CheckpointingPolicy(tuple(sorted(names)))
    allowed = f"{EVERY_SECOND_PRODUCT}, every-K-blocks with K of 2 or more, or operators: {', '.join(OPERATORS)}"
    hint = nearest(unknown[0], (EVERY_SECOND_PRODUCT, "every-2-blocks", *OPERATORS))
    raise SpecError(f"checkpointing_policy: {shown(unknown[0])} is not allowed; {allowed}{hint}")


def written(policy: str) -> str:
    """Return a policy in its one way of writing: lower case, operators in alphabetical order and each once."""
    read = read_policy(policy)
    if read.is_of_blocks:
        return f"every-{read.every_blocks}-blocks"
    return EVERY_SECOND_PRODUCT if read.recomputes_every_second_product else ",".join(read.saved)
