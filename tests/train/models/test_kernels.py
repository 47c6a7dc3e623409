"""Three ways to one loss; the attention kernel that torch chooses on a CPU, and what flash-attn allocates and saves."""

import sys
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.setup import Loss
from fsdp_bench.train.dry_run.fake_world import fake_device
from fsdp_bench.train.measuring.storage_tracker import StorageTracker
from fsdp_bench.train.models import loss
from fsdp_bench.train.models.flash_attn_package import flash_attn_func
from fsdp_bench.train.models.loss import head_loss, loss_function
from fsdp_bench.train.models.transformer import attention_kernel, build, initialize
from tests.on_stand_in.scripts.replaced_operators import storages
from tests.shapes import shape


# inductor itself imports torch.utils.mkldnn, which is written in TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "kind", [Loss.PLAIN, Loss.CHUNKED, pytest.param(Loss.COMPILED, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("tokens", [16, 21, 3])  # 21: chunks of unequal length; 3: fewer tokens than chunks
def test_value_and_gradient_are_those_of_float64(kind: Loss, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, tokens, 33, generator=generator, requires_grad=True)
    targets = torch.randint(33, (1, tokens), generator=generator)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    expected.backward()
    value = loss_function(kind)(logits, targets)
    value.backward()
    torch.testing.assert_close(value.double(), expected)
    torch.testing.assert_close(logits.grad.double(), exact.grad)


def test_the_chunked_loss_has_eight_chunks_none_of_which_keeps_fp32_logits() -> None:
    """A chunk of 24 x 100 bf16 logits is 3 rows, its fp32 copy 1200 bytes; the whole copy would be 9600."""
    logits = torch.randn(2, 12, 100).bfloat16().requires_grad_()
    targets = torch.randint(100, (2, 12))
    with StorageTracker() as tracker, patch.object(loss, "_chunk_sum", wraps=loss._chunk_sum) as chunk_sum:
        value = loss.chunked(logits, targets)
        forward = tracker.live_bytes
        assert chunk_sum.call_count == 8
        assert [call.args[0].shape for call in chunk_sum.call_args_list] == [(3, 100)] * 8
        value.backward()
        assert chunk_sum.call_count == 16  # recomputed
    assert forward < 2 * 24 * 100 + 1200  # the bf16 logits, known by their views, and less than one chunk


def test_the_loss_of_unsloth_ignores_targets_and_keeps_one_fp32_copy_that_becomes_the_gradient() -> None:
    """320 x 500 logits are copied to fp32, 4 bytes each; 4 rows at a time are in work."""
    logits = torch.randn(2, 160, 500).bfloat16().requires_grad_()
    targets = torch.randint(500, (2, 160))
    targets[:, -1] = -100
    expected = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
    (gradient,) = torch.autograd.grad(expected, logits)
    with StorageTracker() as tracker:
        value = loss_function(Loss.UNSLOTH_FP32)(logits, targets)
        forward = tracker.live_bytes
        value.backward()
        backward = tracker.peak_bytes
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad, gradient, rtol=0.02, atol=1e-6)
    small = 40_000  # some numbers a row
    assert 6 * logits.numel() <= forward < 6 * logits.numel() + small
    assert backward < 8 * logits.numel() + 4 * 500 * 4 * 2 + small  # and the gradient in bf16


@pytest.mark.parametrize(
    ("kind", "package"),
    [("flash-attn", "flash_attn"), ("liger", "liger_kernel"), ("liger-fused-linear", "liger_kernel")],
)
def test_a_loss_of_a_package_that_is_missing_says_how_to_install_it(kind: str, package: str) -> None:
    with patch.dict(sys.modules, {package: None}), pytest.raises(MachineError, match=f"needs {package} .*pip install"):
        (head_loss if Loss(kind).includes_head else loss_function)(Loss(kind))


def test_a_loss_with_the_head_takes_what_the_head_takes() -> None:
    """torch's cross-entropy stands for Liger's, which needs a GPU: the same loss and gradients as on logits."""
    tiny = shape(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=33)
    bare = build(tiny, head_loss=lambda weight, x, targets: F.cross_entropy(x @ weight.t(), targets))
    model = bare.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        initialize(parameter, name, 0)
    tokens, targets = torch.randint(33, (2, 4)), torch.randint(33, (2, 4))
    found = model(tokens, targets)
    found.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    expected = loss_function(Loss.PLAIN)(model(tokens), targets)
    expected.backward()
    torch.testing.assert_close(found, expected)
    assert loss_function(Loss.LIGER_FUSED_LINEAR)(found, targets) is found
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_bf16_logits_are_lost_in_fp32() -> None:
    logits = torch.randn(2, 8, 33, dtype=torch.bfloat16)
    targets = torch.randint(33, (2, 8))
    for kind in (Loss.PLAIN, Loss.CHUNKED):
        assert loss_function(kind)(logits, targets).dtype is torch.float32


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
