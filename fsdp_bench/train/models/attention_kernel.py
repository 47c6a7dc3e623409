"""Which kernel torch chooses for attention: FlashAttention, cuDNN, memory-efficient, or single operators."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from fsdp_bench.train.models.transformer import takes_groups


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
