"""Activation offload: what stays on the GPU, as PyTorch's CUDA allocator has it."""

from __future__ import annotations

import pytest

from tests.on_stand_in.simulate.comparing import against_rehearsals, assert_near
from tests.simulate.optimizers.comparing import cells_with

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_it_holds_what_pytorchs_allocator_holds(checkpointing: str) -> None:
    fixed = {"checkpointing": checkpointing, "checkpointing_policy": None, "activation_offload": True}
    assert_near(against_rehearsals(cells_with(14, 81, "cuda", **fixed)))
