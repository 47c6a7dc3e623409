"""Policies of activation checkpointing: how they are read, and what they may be combined with."""

from __future__ import annotations

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import TrainSetup


def test_a_policy_has_one_way_of_writing() -> None:
    """So that setups that are the same are equal, and trials of them have one ID."""
    setup = TrainSetup(checkpointing="selective", checkpointing_policy=" aten.SILU, aten.mm,aten::mm")
    assert setup.checkpointing_policy == "aten.mm,aten.silu"
    assert setup == TrainSetup(checkpointing="selective", checkpointing_policy="aten.mm,aten.silu")
    assert (
        TrainSetup(checkpointing="full", checkpointing_policy="Every-02-Blocks").checkpointing_policy
        == "every-2-blocks"
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("every-second-prodct", "did you mean 'every-second-product'"),
        ("aten.mm,aten.slu", "'aten.slu' is not allowed.*did you mean 'aten.silu'"),
        ("every-1-blocks", "K of 2 or more"),
        ("", "is not allowed"),
    ],
)
def test_an_unknown_policy_names_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(SpecError, match=f"checkpointing_policy: .*{hint}"):
        TrainSetup(checkpointing="selective", checkpointing_policy=text)
