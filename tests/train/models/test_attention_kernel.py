"""The kernel that torch chooses, on a CPU."""

from __future__ import annotations

import pytest
import torch

from fsdp_bench.train.models.transformer import attention_kernel

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_key_value_heads", [8, 2])
def test_half_precision_runs_flash_attention(num_key_value_heads: int) -> None:
    assert attention_kernel(8, num_key_value_heads, 4096, 64, torch.bfloat16, CPU) == "flash_attention"


def test_what_is_switched_off_is_not_named() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernel(8, 8, 128, 64, torch.bfloat16, CPU) == "math"
