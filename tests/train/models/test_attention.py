"""Attention: the kernel that torch chooses on a CPU, and what the flash-attn package allocates and saves."""

from __future__ import annotations

import warnings

import pytest
import torch

from fsdp_bench.train.dry_run.fake_world import fake_device
from fsdp_bench.train.models.flash_attn_package import flash_attn_func
from fsdp_bench.train.models.transformer import attention_kernel
from tests.on_stand_in.scripts.replaced_operators import storages

BATCH, LENGTH, HEADS, KEY_HEADS, WIDTH = 2, 200, 6, 2, 32
QUERIES, KEYS = (BATCH * LENGTH * heads * WIDTH * 2 for heads in (HEADS, KEY_HEADS))
SUMS = BATCH * HEADS * LENGTH * 4
RANDOM_STATE = 16
ROUNDED_SUMS = BATCH * HEADS * 256 * 4
"""softmax_d, whose rows are rounded to 128."""


def run(device: torch.device) -> torch.Tensor:
    """Run causal attention with grouped keys, a window and no mask."""
    q, k, v = (
        torch.empty(BATCH, LENGTH, heads, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    return flash_attn_func(q, k, v, causal=True, window_size=(63, 63))


def test_it_saves_inputs_output_sums_and_random_state_and_no_mask() -> None:
    with warnings.catch_warnings(action="ignore"), fake_device("cuda") as device:
        found = storages(run, device)
    inputs = [QUERIES, KEYS, KEYS]
    assert found["forward"] == [*inputs, QUERIES, SUMS, RANDOM_STATE]
    assert found["saved"] == sorted([*inputs, QUERIES, SUMS, RANDOM_STATE])
    assert found["backward"] == sorted([*inputs, ROUNDED_SUMS])


@pytest.mark.parametrize(
    ("dtype", "width", "reason"),
    [
        (torch.float32, 64, "only support fp16"),
        (torch.float16, 320, "at most 256"),
        (torch.float16, 20, "multiple of 8"),
    ],
)
def test_what_the_package_refuses_is_refused(dtype: torch.dtype, width: int, reason: str) -> None:
    x = torch.empty(1, 8, 2, width, dtype=dtype, device="meta")
    with pytest.raises(RuntimeError, match=reason):
        flash_attn_func(x, x, x)


@pytest.mark.parametrize("num_key_value_heads", [8, 2])
def test_half_precision_runs_flash_attention(num_key_value_heads: int) -> None:
    assert attention_kernel(8, num_key_value_heads, 4096, 64, torch.bfloat16, torch.device("cpu")) == "flash_attention"


def test_what_is_switched_off_is_not_named() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_kernel(8, 8, 128, 64, torch.bfloat16, torch.device("cpu")) == "math"
