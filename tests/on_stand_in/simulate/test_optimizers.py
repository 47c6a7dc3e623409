"""Muon, offloaded optimizers and optimizers in backward: what they allocate, against PyTorch's allocator."""

from __future__ import annotations

import pytest

from tests.on_stand_in.simulate.comparing import against_rehearsals, assert_near
from tests.simulate.optimizers.comparing import cells_with
from tests.simulate.optimizers.test_in_backward import IN_BACKWARD
from tests.simulate.optimizers.test_muon import UNSHARDED
from tests.simulate.optimizers.test_offloaded import FIELDS as OFFLOADED

pytestmark = pytest.mark.slow


def test_muon_holds_what_pytorchs_allocator_holds() -> None:
    assert_near(against_rehearsals(cells_with(12, 58, "cuda", **UNSHARDED)))


def test_an_optimizer_in_backward_holds_what_pytorchs_allocator_holds() -> None:
    assert_near(against_rehearsals(cells_with(12, 54, "cuda", **IN_BACKWARD)))


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
def test_an_offloaded_optimizer_holds_what_pytorchs_allocator_holds(optimizer: str) -> None:
    assert_near(against_rehearsals(cells_with(8, 56, "cuda", **OFFLOADED, optimizer=optimizer)))
