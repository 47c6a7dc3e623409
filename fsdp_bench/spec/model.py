"""ModelShape: a transformer's dimensions, its exact parameter count and its FLOPs.

Names follow Hugging Face's config.json. Two families:

    llama   RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases, untied head by default
    gpt2    LayerNorm, GELU, learned positions, biases, head tied to the embedding by default

Tests compare every count with the modules of train/models/transformer.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta
from msgspec.structs import asdict, replace

from fsdp_bench.spec.checked import CaseInsensitiveEnum, Checked, Count
from fsdp_bench.spec.checkpointing_policy import ATTENTION
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.hardware import Gpu
from fsdp_bench.spec.setup import Checkpointing, Reentrant, TrainSetup
from fsdp_bench.spec.units import format_count


class Family(CaseInsensitiveEnum):
    """The transformer families that train/models/transformer.py builds."""

    LLAMA = "llama"
    GPT2 = "gpt2"


LARGEST_DIMENSION = 2**24
"""Upper limit of every dimension, so that tensor sizes stay within int64."""
Dimension = Annotated[int, Meta(ge=1, le=LARGEST_DIMENSION)]


LONGEST_NAME = 200
"""The most characters of a model's name, which tables, charts and file names contain."""


class ModelShape(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dimensions of one model, in numbers of elements.

    Raises SpecError if one is not positive, or they do not divide as attention needs.
    """

    name: str
    family: Family
    num_hidden_layers: Dimension
    hidden_size: Dimension
    num_attention_heads: Dimension
    num_key_value_heads: Dimension
    intermediate_size: Dimension
    vocab_size: Dimension
    max_position_embeddings: Count
    """Number of learned positions (gpt2). For llama, with rotary positions, a limit without parameters."""
    tie_word_embeddings: bool = False

    def _check(self) -> None:
        if not self.name.isprintable() or len(self.name) > LONGEST_NAME:
            raise SpecError(f"name: {shown(self.name)} is not allowed; up to {LONGEST_NAME} printable characters")
        if self.hidden_size % self.num_attention_heads:
            raise SpecError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise SpecError(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.family is Family.GPT2 and self.num_key_value_heads != self.num_attention_heads:
            raise SpecError("num_key_value_heads: gpt2 has no grouped-query attention; leave it equal to the heads")
        if self.family is Family.LLAMA and self.head_dim % 2:
            raise SpecError(f"hidden_size: rotary positions need an even head size, not {self.head_dim}")

    has_fused_attention: ClassVar[bool] = True
    has_flash_attn: ClassVar[bool] = False
    """Its attention is torch's, not the flash-attn package's."""
    has_frozen_parameters: ClassVar[bool] = False

    def knows_attention(self, gpu: Gpu | None, compute: str) -> bool:
        """Whether it is known which kernels of attention a GPU runs in a compute dtype, and what they need."""
        return gpu is None or gpu.native_bf16 or compute == "fp32" or gpu.is_before_sm80

    @property
    def kind(self) -> str:
        """The family, as tables and charts name it."""
        return self.family.value

    @property
    def learned_positions(self) -> int | None:
        """The longest sequence, where positions are learned; else None."""
        return self.max_position_embeddings if self.family is Family.GPT2 else None

    longest_sequence = learned_positions

    def for_length(self, _sequence_length: int) -> ModelShape:
        """Return the model for sequences of a length: itself."""
        return self

    @property
    def num_blocks(self) -> int:
        """The blocks that are alike: all layers."""
        return self.num_hidden_layers

    shortest_sequence = 1
    has_tokens = True

    repeats = True
    """Whether one block may stand for others."""

    def with_blocks(self, num_blocks: int) -> ModelShape:
        """Return the model with another number of layers."""
        return replace(self, num_hidden_layers=num_blocks)

    with_layers = with_blocks

    def allowed_layers(self, most: int) -> range:
        """Return the numbers of layers that the model can have."""
        return range(1, most + 1)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values: key-value heads times head width."""
        return self.num_key_value_heads * self.head_dim

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one transformer block."""
        d, kv, f = self.hidden_size, self.kv_size, self.intermediate_size
        if self.family is Family.LLAMA:
            return d * d + 2 * d * kv + d * d + 3 * d * f + 2 * d
        attention = d * 3 * d + 3 * d + d * d + d
        feed_forward = d * f + f + f * d + d
        return attention + feed_forward + 4 * d

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside the blocks: embeddings, last norm, and the head when it is not tied."""
        v, d = self.vocab_size, self.hidden_size
        head = 0 if self.tie_word_embeddings else v * d
        if self.family is Family.LLAMA:
            return v * d + d + head
        return v * d + self.max_position_embeddings * d + 2 * d + head

    @property
    def num_parameters(self) -> int:
        """Number of parameters. A tied head counts once."""
        return self.num_hidden_layers * self.num_block_parameters + self.num_root_parameters

    def block_forward_flops_per_token(self, sequence_length: int, causal: bool = True) -> float:
        """Return the FLOPs of one block's forward pass for one token, two per multiply-add.

        Matrix products: 2 x the block's matrices. Attention: QK^T and AV, 2 x 2 x keys x hidden_size, where a
        causal token sees (sequence_length + 1) / 2 keys on average. Norms, activations and the softmax are not
        counted (Chowdhery et al. 2022, PaLM, appendix B).
        """
        return sum(flops for _, flops in self._operators_of_a_block(sequence_length, causal))

    def forward_flops_per_token(self, sequence_length: int, causal: bool = True) -> float:
        """Return the FLOPs of the forward pass for one token: blocks and head. Embedding look-ups count as 0."""
        blocks = self.num_hidden_layers * self.block_forward_flops_per_token(sequence_length, causal)
        return blocks + 2 * self.vocab_size * self.hidden_size

    def model_flops_per_token(self, sequence_length: int, causal: bool = True) -> float:
        """Return the FLOPs of one training step for one token, without recomputation: three forward passes."""
        return 3 * self.forward_flops_per_token(sequence_length, causal)

    def hardware_flops_per_token(self, setup: TrainSetup, causal: bool = True) -> float:
        """Return the FLOPs of one training step for one token, including recomputation by checkpointing.

        ``full`` repeats a block's forward up to its last matrix product (set_checkpoint_early_stop), or all of it where
        it is reentrant; ``selective`` what its ``policy`` does not save, by default nothing counted here. Attention is
        saved if any of its kernels is named. Recomputation inside fused attention kernels is not counted.
        """
        flops = self.model_flops_per_token(setup.sequence_length, causal)
        if setup.checkpointing is Checkpointing.NONE:
            return flops
        read = setup.policy
        *earlier, last = self._operators_of_a_block(setup.sequence_length, causal)
        if setup.checkpointing is Checkpointing.FULL:
            num_blocks = -(-self.num_hidden_layers // read.every_blocks)
            again = earlier if setup.reentrant is Reentrant.NO else [*earlier, last]
            return flops + num_blocks * sum(each for _, each in again)
        recomputed, num_products = 0.0, 0
        for name, each in earlier:
            num_products += name == "aten.mm"
            is_saved = any(read.saves(one, num_products) for one in (ATTENTION if name in ATTENTION else (name,)))
            recomputed += 0.0 if is_saved else each
        return flops + self.num_hidden_layers * recomputed

    def _operators_of_a_block(self, sequence_length: int, causal: bool) -> list[tuple[str, float]]:
        """Return a block's matrix products and attention in their order, with the FLOPs of each for one token."""
        d, kv, f = self.hidden_size, self.kv_size, self.intermediate_size
        keys = (sequence_length + 1) / 2 if causal else sequence_length
        attention = ATTENTION[0], 4 * keys * d
        before, after = [d * 3 * d], [d * d, d * f, f * d]
        if self.family is Family.LLAMA:
            before, after = [d * d, d * kv, d * kv], [d * d, d * f, d * f, f * d]
        name = "aten.mm" if self.family is Family.LLAMA else "aten.addmm"
        return [*((name, 2.0 * n) for n in before), attention, *((name, 2.0 * n) for n in after)]

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "family": self.family.value, "num_parameters": self.num_parameters}

    def describe(self) -> str:
        """Return one line for tables and charts: ``llama 6.74B (32 layers x 4096, 32 heads, vocabulary 32000)``."""
        heads = f"{self.num_attention_heads} heads"
        if self.num_key_value_heads != self.num_attention_heads:
            heads += f" / {self.num_key_value_heads} kv"
        return (
            f"{self.family.value} {format_count(self.num_parameters)} "
            f"({self.num_hidden_layers} layers x {self.hidden_size}, {heads}, vocabulary {self.vocab_size})"
        )
