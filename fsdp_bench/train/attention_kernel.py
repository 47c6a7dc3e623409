"""Which of torch's kernels attention runs: FlashAttention, cuDNN's, the memory-efficient one, or single operators."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend


def attention_kernel(
    num_heads: int, num_key_value_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Return torch's name of the kernel that causal attention of such tensors runs in training, in lower case.

    It allocates one row: the tensors are views of it, of ``1, heads, length, head_dim``.
    """
    row = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device, requires_grad=True)
    q, k = (row.expand(1, heads, length, head_dim) for heads in (num_heads, num_key_value_heads))
    chosen = torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=num_heads > num_key_value_heads)
    return SDPBackend(chosen).name.lower()
