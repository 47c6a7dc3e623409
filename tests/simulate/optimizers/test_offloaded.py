"""torchao's CPUOffloadOptimizer: memory on the GPU, host memory, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.replay.host_memory import host_memory
from fsdp_bench.simulate.operators.optimizer import Shard
from fsdp_bench.simulate.optimizers.dispatch import is_offloaded
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import TrainSetup
from tests.simulate.test_step import shape

FIELDS: dict[str, Any] = {
    "api": "fsdp2",
    "offload": "optimizer",
    "optimizer_in_backward": False,
    "max_grad_norm": None,
    "use_orig_params": True,
    "limit_all_gathers": True,
}


def test_small_parameters_stay_with_an_optimizer_on_the_gpu() -> None:
    """torchao/optim/cpu_offload.py: ``minimal_size = 4096``, of the whole parameter."""
    assert is_offloaded(Shard(2048, 4, 0, shape=(64, 64)))
    assert not is_offloaded(Shard(4095, 4, 0, shape=(4095,)))


def test_host_memory_holds_copies_of_parameters_and_gradients_and_both_moments() -> None:
    model = shape(num_hidden_layers=2, hidden_size=128, num_attention_heads=4)
    found = host_memory(
        SimulatedSteps(model, TrainSetup(world_size=2, **FIELDS, optimizer="adamw-fused")), ranks_per_node=2
    )
    matrices = model.num_parameters - 128 * (2 * model.num_hidden_layers + 1)  # norms have fewer elements
    assert found.optimizer_state_bytes == 2 * matrices * 4
    assert found.pinned_parameters_bytes == found.pinned_gradients_bytes >= matrices * 4
    assert found.temporary_bytes == 0


@pytest.mark.parametrize(
    ("fields", "device", "says"),
    [
        ({}, "cpu", "offload params under fsdp2"),
        ({"api": "fsdp1"}, "cuda", "use api fsdp2"),
        ({"strategy": "ddp"}, "cuda", "a strategy that shards"),
        ({"optimizer": "sgd"}, "cuda", "use adamw-fused"),
        ({"max_grad_norm": 1.0}, "cuda", "leave out max_grad_norm"),
        ({"precision": "fp16-mixed"}, "cuda", "use bf16-mixed"),
    ],
)
def test_an_impossible_setup_is_refused_with_an_alternative(fields: dict[str, Any], device: str, says: str) -> None:
    reason = impossible(TrainSetup(world_size=2, **(FIELDS | fields)), device)
    assert reason is not None
    assert says in reason
