"""Optimizers: sizes by hand. test_against_dry_run.py compares their memory, torchao's in on_stand_in."""

from typing import Any

import pytest

from fsdp_bench.replay.host_memory import host_memory
from fsdp_bench.simulate.optimizers.dispatch import bytes_of_moment, is_offloaded
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs, result_of
from tests.shapes import memory_of, shape

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


def test_muon_under_fully_shard_is_not_predicted_and_the_dry_run_that_is_recommended_works() -> None:
    setup = TrainSetup(api="fsdp2", world_size=4, optimizer="muon", sequence_length=8)
    with pytest.raises(SpecError, match="dry-run or rehearse it"):
        memory_of(shape(), setup)
    ((_, answer),) = dry_runs([DryRunSpec(model=shape(num_hidden_layers=1), setup=setup, kernels="cuda")])
    assert result_of(answer).phases["optimizer"] > 0


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
