"""The benchmark models: llama and gpt2 in plain PyTorch, as users write them.

Not covered: dropout, key-value caches, tensor parallelism. Parameters have Hugging Face's names. No module has a
buffer: rotary tables are computed in the forward pass of the root, so only parameters need materialising.

Shape suffixes: B batch, S sequence, D hidden_size, H heads, K key-value heads, E head_dim, F intermediate_size,
V vocab_size.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.data import DistributedSampler

from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.models.loss import HeadLoss

ROPE_THETA = 10000.0
NORM_EPS = 1e-5
INIT_STD = 0.02


def takes_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether fused attention accepts fewer key-value heads than query heads.

    The fused CUDA kernels for float32 do not, so keys and values are expanded: with ``enable_gqa`` torch
    would fall back to the unfused kernel (aten/native/transformers/cuda/sdp_utils.cpp).
    """
    return device.type == "cpu" or dtype is not torch.float32


def attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
    """Causal attention with grouped queries; returns B, H, S, E."""
    groups = q_BHSE.shape[1] // k_BKSE.shape[1]
    if groups > 1 and not takes_groups(q_BHSE.dtype, q_BHSE.device):
        k_BKSE, v_BKSE = (t.repeat_interleave(groups, dim=1) for t in (k_BKSE, v_BKSE))
        groups = 1
    return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=groups > 1)


def split_heads(x_BSD: Tensor, head_dim: int) -> Tensor:
    """Return B, heads, S, head_dim."""
    return x_BSD.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x_BHSE: Tensor) -> Tensor:
    """Return B, S, H * E, contiguous. Heads are copied only if they were padded."""
    return x_BHSE.transpose(1, 2).flatten(2).contiguous()


def rotary_tables(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each S, E, computed in fp32 and cast (Su et al. 2021)."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Apply rotary positions to the two halves of each head."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        """Map B, S, D to B, S, D."""
        q = rotate(split_heads(self.q_proj(x_BSD), self.head_dim), cos_SE, sin_SE)
        k = rotate(split_heads(self.k_proj(x_BSD), self.head_dim), cos_SE, sin_SE)
        v = split_heads(self.v_proj(x_BSD), self.head_dim)
        return self.o_proj(merge_heads(attention(q.to(v.dtype), k.to(v.dtype), v)))


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map B, S, D to B, S, D."""
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class LlamaBlock(nn.Module):
    """One llama layer: attention and feed-forward, each after its norm, each added to the residual."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)
        self.mlp = LlamaMLP(shape)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        """Map B, S, D to B, S, D."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class GPT2Block(nn.Module):
    """One gpt2 layer: pre-norm attention and GELU feed-forward, with biases."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.ln_1 = nn.LayerNorm(shape.hidden_size, eps=NORM_EPS)
        self.c_attn = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.c_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.ln_2 = nn.LayerNorm(shape.hidden_size, eps=NORM_EPS)
        self.c_fc = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.mlp_proj = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map B, S, D to B, S, D."""
        q, k, v = (split_heads(part, self.head_dim) for part in self.c_attn(self.ln_1(x_BSD)).chunk(3, dim=-1))
        x_BSD = x_BSD + self.c_proj(merge_heads(attention(q, k, v)))
        return x_BSD + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x_BSD)), approximate="tanh"))


class Transformer(nn.Module):
    """The base of both families: blocks, and a head that may use the embedding's weight.

    A tied head reads the embedding's parameter instead of registering it twice, so wrappers need not handle it.
    """

    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.head_loss: HeadLoss | None = None
        """A loss that includes the head; forward then takes targets B, S, too, and returns the mean loss."""
        tied = shape.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    @property
    def modules_read_by_root(self) -> tuple[nn.Module, ...]:
        """Modules whose parameters the root reads outside of their forward, so that they cannot be FSDP units."""
        return () if self.lm_head is not None else (self.embedding,)

    @property
    def modules_before_blocks(self) -> tuple[nn.Module, ...]:
        """The embeddings, that of the tokens first: with wrap = "block-and-ends" a unit."""
        return (self.embedding,)

    @property
    def modules_after_blocks(self) -> tuple[nn.Module, ...]:
        """The final norm and the head, which comes last: with wrap = "block-and-ends" a unit."""
        return (self.norm,) if self.lm_head is None else (self.norm, self.lm_head)

    def head(self, x_BSD: Tensor, targets_BS: Tensor | None) -> Tensor:
        """Map B, S, D to logits B, S, V, or to the mean loss."""
        if self.head_loss is not None and targets_BS is not None:
            weight_VD = self.embedding.weight if self.lm_head is None else self.lm_head.weight
            return self.head_loss(weight_VD, x_BSD.flatten(0, 1), targets_BS.flatten())
        return self.lm_head(x_BSD) if self.lm_head is not None else F.linear(x_BSD, self.embedding.weight)


class Llama(Transformer):
    """The llama model: RMSNorm, SwiGLU, rotary positions, grouped-query attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Map token numbers B, S to logits B, S, V, or with targets to the mean loss."""
        x_BSD = self.embedding(tokens_BS)
        cos_SE, sin_SE = rotary_tables(tokens_BS.shape[1], self.shape.head_dim, x_BSD.device, x_BSD.dtype)
        for block in self.blocks:
            x_BSD = block(x_BSD, cos_SE, sin_SE)
        return self.head(self.norm(x_BSD), targets_BS)


class GPT2(Transformer):
    """The gpt2 model: LayerNorm, GELU, learned positions, biases."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.blocks = nn.ModuleList(GPT2Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.LayerNorm(shape.hidden_size, eps=NORM_EPS)

    @property
    def modules_before_blocks(self) -> tuple[nn.Module, ...]:
        """The embeddings of tokens and positions."""
        return (self.embedding, self.positions)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Map token numbers B, S to logits B, S, V, or with targets to the mean loss."""
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.embedding(tokens_BS) + self.positions(positions_S)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD), targets_BS)


BLOCKS: dict[Family, type[nn.Module]] = {Family.LLAMA: LlamaBlock, Family.GPT2: GPT2Block}


def build(shape: ModelShape, dtype: torch.dtype = torch.float32, head_loss: HeadLoss | None = None) -> Transformer:
    """Build a model on the meta device, with parameters of ``dtype``. Nothing is allocated."""
    with torch.device("meta"):
        model = Llama(shape) if shape.family is Family.LLAMA else GPT2(shape)
    model.head_loss = head_loss
    return model.to(dtype)


@torch.no_grad()
def initialize(parameter: Tensor, name: str, seed: int) -> None:
    """Fill one whole parameter in place with values that depend only on its name, its shape and the seed.

    So every wrapper, on any number of ranks, starts from the same model without moving weights between ranks.
    Norm weights are ones, biases zeros, everything else normal with standard deviation 0.02.
    """
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # a CPU's generator reads 32 bits
        values = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
        parameter.copy_(values.normal_(std=INIT_STD, generator=generator))


def attention_kernel(
    num_heads: int, num_key_value_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Return torch's name, in lower case, of the kernel that causal attention of these shapes uses in training.

    It allocates a query and a key of one sequence in the layout of training, because torch's choice depends on strides
    and gradients.
    """
    key_heads = num_key_value_heads if takes_groups(dtype, device) else num_heads
    q, k = (
        torch.empty(1, length, heads, head_dim, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)
        for heads in (num_heads, key_heads)
    )
    chosen = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=num_heads > key_heads)
    return SDPBackend(chosen).name.lower()


# -- Random token batches: different on every rank, determined by the seed ---------------------------------------------


def batches(setup: TrainSetup, vocab_size: int, num_steps: int, rank: int, world_size: int) -> Iterator[list[Tensor]]:
    """Yield this rank's micro-batches of tokens B, S + 1 by step: the same global batch for every world size."""

    def sequence(index: int) -> Tensor:
        """Return random tokens, one more than the model's input, for the shifted targets."""
        generator = torch.Generator().manual_seed(setup.seed * 1_000_003 + index)
        return torch.randint(vocab_size, (setup.sequence_length + 1,), generator=generator)

    numbers: Any = range(setup.global_batch_size * num_steps)
    indices = iter(DistributedSampler[int](numbers, world_size, rank, shuffle=True, seed=setup.seed))
    per_micro_batch = setup.global_batch_size // (world_size * setup.gradient_accumulation_steps)
    for _ in range(num_steps):
        yield [
            torch.stack([sequence(next(indices)) for _ in range(per_micro_batch)])
            for _ in range(setup.gradient_accumulation_steps)
        ]
