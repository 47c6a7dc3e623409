"""Predicted peaks of drawn setups, some of their fields fixed, against PyTorch's CUDA allocator on the stand-in."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.on_stand_in.rehearsing import STUBS
from tests.simulate.comparing import against_rehearsals, assert_near, cells_with
from tests.simulate.test_optimizers import IN_BACKWARD, OFFLOADED, UNSHARDED

ACTIVATIONS: dict[str, Any] = {"activation_offload": True, "checkpointing_policy": None}
REENTRANT: dict[str, Any] = {"checkpointing": "full", "checkpointing_policy": None, "activation_offload": False}
HEAD_IN_LOSS: dict[str, Any] = {
    **{"api": "fsdp2", "strategy": "NO_SHARD", "precision": "bf16-mixed", "loss": "liger-fused-linear"}
}
FIXED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "Adafactor": (52, 12, {"optimizer": "adafactor"}),
    # torch.compile tunes kernels in the first step, with a buffer as large as the GPU's L2 cache.
    "AdamW8bit": (55, 8, {"optimizer": "adamw-8bit", "optimizer_in_backward": False, "offload": "none"}),
    "Muon": (58, 12, UNSHARDED),
    "optimizer in backward": (54, 12, IN_BACKWARD),
    "offloaded fused AdamW": (56, 8, OFFLOADED | {"optimizer": "adamw-fused"}),
    "offloaded foreach AdamW": (56, 8, OFFLOADED | {"optimizer": "adamw-foreach"}),
    "activation offload": (81, 14, ACTIVATIONS | {"checkpointing": "none"}),
    "activation offload and full checkpointing": (81, 14, ACTIVATIONS | {"checkpointing": "full"}),
    "reentrant checkpointing": (91, 12, REENTRANT | {"reentrant": "inside"}),
    "reentrant checkpointing around units": (92, 12, REENTRANT | {"reentrant": "around"}),
    "flash-attn's loss": (101, 20, {"loss": "flash-attn"}),
    "Liger's loss": (101, 20, {"loss": "liger"}),
    "Liger's loss with the head": (101, 20, {"loss": "liger-fused-linear"}),
    "Liger's loss with the head under autocast": (102, 20, HEAD_IN_LOSS | {"optimizer": "adamw-fused"}),
    # The logits are larger than the buffer of the size of the L2 cache.
    "compiled loss": (74, 12, {"loss": "compiled", "micro_batch_size": 2, "sequence_length": 4096}),
}
"""The seed, the number of setups, and the fields that are fixed."""
PACKAGES = {"flash-attn": "flash_attn", "liger": "liger_kernel", "liger-fused-linear": "liger_kernel"}
"""The package of a loss."""
QUICK = {
    *("Adafactor", "Muon", "optimizer in backward", "offloaded fused AdamW"),
    *("activation offload and full checkpointing", "Liger's loss"),
}


def test_one_setup_of_each_kind_allocates_what_is_predicted() -> None:
    drawn = [cells_with(1, seed, "cuda", **fields) for seed, _, fields in map(FIXED.__getitem__, sorted(QUICK))]
    assert_near(against_rehearsals([cell for cells in drawn for cell in cells]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIXED)
def test_setups_of_a_kind_allocate_what_is_predicted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, count, fields = FIXED[kind]
    package = PACKAGES.get(fields.get("loss", ""))
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setenv("PYTHONPATH", str(STUBS), prepend=":")
    cells = cells_with(count, seed, "cuda", **fields)
    if kind == "Liger's loss with the head under autocast":
        cells += cells_with(8, 73, "cuda", **HEAD_IN_LOSS, optimizer="sgd")
    assert_near(against_rehearsals(cells))
