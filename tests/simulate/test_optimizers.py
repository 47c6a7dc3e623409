"""Optimizers: sizes by hand, and refusals. test_against_dry_run.py compares their memory, torchao's in on_stand_in."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.replay.host_memory import host_memory
from fsdp_bench.simulate.optimizers.dispatch import bytes_of_moment, is_offloaded
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs
from tests.predicted import memory_of
from tests.shapes import shape

UNSHARDED: dict[str, Any] = {
    "strategy": "NO_SHARD",
    "shard_size": None,
    "optimizer": "muon",
    "optimizer_in_backward": False,
    "use_orig_params": True,
    "limit_all_gathers": True,
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": False,
}
IN_BACKWARD: dict[str, Any] = {
    "optimizer_in_backward": True,
    "max_grad_norm": None,
    "gradient_accumulation_steps": 1,
    "offload": "none",
}
OFFLOADED: dict[str, Any] = {
    "api": "fsdp2",
    "offload": "optimizer",
    "optimizer_in_backward": False,
    "max_grad_norm": None,
    "use_orig_params": True,
    "limit_all_gathers": True,
}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"api": "fsdp2", "optimizer": "adafactor"}, "cuda", "use fsdp1, or NO_SHARD"),
    ({"optimizer": "adamw-8bit", "offload": "params"}, "cuda", "use adamw-fused"),
    ({"optimizer": "muon"}, "cuda", "use fsdp2, or NO_SHARD"),
    (IN_BACKWARD | {"gradient_accumulation_steps": 2}, "cuda", "accumulate 1"),
    (IN_BACKWARD | {"max_grad_norm": 1.0}, "cuda", "leave out max_grad_norm"),
    (IN_BACKWARD | {"precision": "fp16-mixed"}, "cuda", "bf16-mixed"),
    (IN_BACKWARD | {"offload": "params"}, "cuda", "use one of them"),
    (IN_BACKWARD | {"use_orig_params": False}, "cuda", "use_orig_params = true"),
    (IN_BACKWARD | {"api": "fsdp2", "strategy": "ddp"}, "cuda", "a strategy that shards, or fsdp1"),
    (OFFLOADED, "cpu", "offload params under fsdp2"),
    (OFFLOADED | {"api": "fsdp1"}, "cuda", "use api fsdp2"),
    (OFFLOADED | {"strategy": "ddp"}, "cuda", "a strategy that shards"),
    (OFFLOADED | {"optimizer": "sgd"}, "cuda", "use adamw-fused"),
    (OFFLOADED | {"max_grad_norm": 1.0}, "cuda", "leave out max_grad_norm"),
    (OFFLOADED | {"precision": "fp16-mixed"}, "cuda", "use bf16-mixed"),
]


@pytest.mark.parametrize(("fields", "device", "says"), REFUSED)
def test_an_impossible_combination_is_refused_with_an_alternative(
    fields: dict[str, Any], device: str, says: str
) -> None:
    assert says in (impossible(TrainSetup(world_size=2, **fields), device) or "")


def test_adafactor_under_ddp_is_not_refused() -> None:
    assert impossible(TrainSetup(api="fsdp2", strategy="ddp", world_size=2, optimizer="adafactor"), "cuda") is None


def test_muon_under_fully_shard_is_not_predicted_and_the_dry_run_that_is_recommended_works() -> None:
    setup = TrainSetup(api="fsdp2", world_size=4, optimizer="muon", sequence_length=8)
    with pytest.raises(SpecError, match="dry-run or rehearse it"):
        memory_of(shape(), setup)
    ((_, answer),) = dry_runs([DryRunSpec(model=shape(num_hidden_layers=1), setup=setup, kernels="cuda")])
    assert answer.result is not None, answer.error
    assert answer.result.phases["optimizer"] > 0


def test_a_moment_in_8_bits_takes_a_byte_a_value_where_blocks_are_whole() -> None:
    """torchao/optim/adam.py, _new_buffer: 4096 values or more, a multiple of 256; subclass_8bit.py, zeros."""
    assert bytes_of_moment(65536, 4) == [65536, 256 * 4, 256 * 4]
    assert bytes_of_moment(4095, 2) == [4095 * 2]
    assert bytes_of_moment(4096 + 128, 4) == [(4096 + 128) * 4]


def test_small_parameters_stay_with_an_optimizer_on_the_gpu() -> None:
    """torchao/optim/cpu_offload.py: ``minimal_size = 4096``, of the whole parameter."""
    assert is_offloaded(Shard(2048, 4, 0, shape=(64, 64)))
    assert not is_offloaded(Shard(4095, 4, 0, shape=(4095,)))


def test_host_memory_of_an_offloaded_optimizer_holds_parameters_gradients_and_both_moments() -> None:
    model = shape(num_hidden_layers=2, hidden_size=128, num_attention_heads=4)
    setup = TrainSetup(world_size=2, **OFFLOADED, optimizer="adamw-fused")
    found = host_memory(SimulatedSteps(model, setup), ranks_per_node=2)
    matrices = model.num_parameters - 128 * (2 * model.num_hidden_layers + 1)  # norms have fewer elements
    assert found.optimizer_state_bytes == 2 * matrices * 4
    assert found.pinned_parameters_bytes == found.pinned_gradients_bytes >= matrices * 4
    assert found.temporary_bytes == 0
