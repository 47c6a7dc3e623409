"""Losses of other packages and compiled ones: what they hold, as PyTorch's CUDA allocator has it."""

from __future__ import annotations

import importlib.util

import pytest

from fsdp_bench.spec.setup import Loss
from tests.on_stand_in.rehearsing import STUBS
from tests.on_stand_in.simulate.comparing import against_rehearsals, assert_near
from tests.simulate.losses.test_fused_losses import FUSED
from tests.simulate.optimizers.comparing import cells_with

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("loss", FUSED)
def test_it_holds_what_pytorchs_allocator_holds(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "flash_attn" if loss is Loss.FLASH_ATTN else "liger_kernel"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setenv("PYTHONPATH", str(STUBS), prepend=":")
    assert_near(against_rehearsals(cells_with(20, 101, "cuda", loss=loss)))


def test_the_head_in_the_loss_under_autocast() -> None:
    pytest.importorskip("liger_kernel")
    fixed = {"api": "fsdp2", "strategy": "NO_SHARD", "precision": "bf16-mixed"}
    cells = cells_with(8, 73, "cuda", loss="liger-fused-linear", optimizer="sgd", **fixed)
    cells += cells_with(20, 102, "cuda", loss="liger-fused-linear", optimizer="adamw-fused", **fixed)
    assert_near(against_rehearsals(cells))


def test_the_compiled_loss_where_logits_are_larger_than_the_gpus_cache() -> None:
    """In its first step torch.compile tunes the kernels, with a buffer as large as the GPU's L2 cache."""
    sizes = {"micro_batch_size": 2, "sequence_length": 4096}
    assert_near(against_rehearsals(cells_with(12, 74, "cuda", loss="compiled", **sizes)))
