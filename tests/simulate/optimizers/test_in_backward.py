"""Optimizers in backward: freed gradients, and refusals. test_against_dry_run.py compares their memory."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import TrainSetup
from tests.predicted import memory_of
from tests.simulate.test_step import shape

IN_BACKWARD: dict[str, Any] = {
    "optimizer_in_backward": True,
    "max_grad_norm": None,
    "gradient_accumulation_steps": 1,
    "offload": "none",
}


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_no_gradient_is_left_when_backward_ends(api: str) -> None:
    """All shards of the gradients, 4 bytes a parameter, are missing in the optimizer's phase."""
    model = shape(num_hidden_layers=8, vocab_size=64)
    after = TrainSetup(api=api, strategy="zero2", world_size=2, optimizer="sgd", sequence_length=8)
    inside = TrainSetup(
        api=api, strategy="zero2", world_size=2, optimizer="sgd", sequence_length=8, **{"optimizer_in_backward": True}
    )
    peaks = [memory_of(model, setup, CUDA).phases["optimizer"] for setup in (after, inside)]
    assert peaks[0] - peaks[1] >= model.num_parameters // 2 * 4


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gradient_accumulation_steps": 2}, "accumulate 1"),
        ({"max_grad_norm": 1.0}, "leave out max_grad_norm"),
        ({"precision": "fp16-mixed"}, "bf16-mixed"),
        ({"offload": "params"}, "use one of them"),
        ({"use_orig_params": False}, "use_orig_params = true"),
        ({"api": "fsdp2", "strategy": "ddp"}, "a strategy that shards, or fsdp1"),
    ],
)
def test_an_impossible_combination_is_refused_with_an_alternative(fields: dict[str, Any], says: str) -> None:
    reason = impossible(TrainSetup(world_size=2, optimizer_in_backward=True, **fields), "cuda")
    assert reason is not None
    assert says in reason
