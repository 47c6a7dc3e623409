"""Muon, offloaded optimizers and optimizers in backward: what they allocate, against PyTorch's allocator."""

from __future__ import annotations

import pytest

from tests.on_stand_in.simulate.comparing import against_rehearsals, assert_near
from tests.simulate.optimizers.comparing import cells_with
from tests.simulate.optimizers.test_in_backward import IN_BACKWARD
from tests.simulate.optimizers.test_muon import UNSHARDED
from tests.simulate.optimizers.test_offloaded import FIELDS as OFFLOADED

EACH = {
    "adafactor": (52, {"optimizer": "adafactor"}),
    "muon": (58, UNSHARDED),
    "in backward": (54, IN_BACKWARD),
    "offloaded": (56, OFFLOADED | {"optimizer": "adamw-fused"}),
    "activations offloaded": (81, {"checkpointing": "full", "checkpointing_policy": None, "activation_offload": True}),
    "liger": (101, {"loss": "liger"}),
}
"""A seed and what is fixed of each; more cells are below, and in the other files."""


def test_one_cell_of_each_holds_what_pytorchs_allocator_holds() -> None:
    cells = [cell for seed, fixed in EACH.values() for cell in cells_with(1, seed, "cuda", **fixed)]
    assert_near(against_rehearsals(cells))


@pytest.mark.slow
def test_muon_holds_what_pytorchs_allocator_holds() -> None:
    assert_near(against_rehearsals(cells_with(12, 58, "cuda", **UNSHARDED)))


@pytest.mark.slow
def test_an_optimizer_in_backward_holds_what_pytorchs_allocator_holds() -> None:
    assert_near(against_rehearsals(cells_with(12, 54, "cuda", **IN_BACKWARD)))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
def test_an_offloaded_optimizer_holds_what_pytorchs_allocator_holds(optimizer: str) -> None:
    assert_near(against_rehearsals(cells_with(8, 56, "cuda", **OFFLOADED, optimizer=optimizer)))
