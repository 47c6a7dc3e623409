"""Predictions and dry runs against real tensors on the CPU, in every phase, to the byte."""

from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.operators.kernels import CPU
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, OptimizerKind, Precision, ShardingStrategy, TrainSetup, Wrap
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from tests.shapes import memory_of, shape
from tests.simulate.comparing import assert_equals_dry_runs
from tools.validate.random_setups import Cell

FP16 = Precision.parse("fp16-mixed")


def _cell(rank: int = 0, sizes: dict[str, Any] | None = None, **setup: Any) -> Cell:
    fields = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields |= {"intermediate_size": 24, "vocab_size": 31, "max_position_embeddings": 16}
    model = shape(**fields | (sizes or {}))
    return Cell(model=model, setup=TrainSetup(**{"world_size": 2, "sequence_length": 8, **setup}), rank=rank)


CELLS = {
    "a collective's result is waited for in place": _cell(
        api=Api.FSDP2, precision=FP16, optimizer=OptimizerKind.ADAMW_FUSED
    ),
    "norms of distributed tensors": _cell(api=Api.FSDP2, optimizer=OptimizerKind.SGD, max_grad_norm=1.0),
    "a root whose parameters are all in units below has no flat parameter": _cell(
        wrap=Wrap.SIZE, min_num_params=1, use_orig_params=False, max_grad_norm=1.0
    ),
    "the gradient scaler's tensors come with the first scaled loss": _cell(
        sizes={"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 512, "num_key_value_heads": 2},
        sequence_length=1,
        precision=FP16,
        use_orig_params=False,
        checkpointing=Checkpointing.FULL,
        optimizer=OptimizerKind.SGD,
    ),
    "fully_shard's parameters are filled in the model's order": _cell(
        sizes={"num_hidden_layers": 4, "hidden_size": 280, "num_attention_heads": 7, "intermediate_size": 1}
        | {"vocab_size": 97, "tie_word_embeddings": True},
        api=Api.FSDP2,
        wrap=Wrap.SIZE,
        min_num_params=1,
        world_size=12,
    ),
    "DistributedDataParallel compares shapes over all ranks": _cell(
        api=Api.FSDP2, strategy=ShardingStrategy.NO_SHARD, world_size=4096
    ),
    "a matrix of one column is no vector": _cell(
        sizes={"family": Family.GPT2, "hidden_size": 1, "num_attention_heads": 1}
        | {"vocab_size": 1, "intermediate_size": 2},
        api=Api.FSDP2,
        world_size=2,
    ),
    "another rank's pieces of the parameters": _cell(
        rank=1, sizes={"hidden_size": 64, "intermediate_size": 512}, optimizer=OptimizerKind.ADAMW_FOR_LOOP
    ),
    "the last rank pads its part": _cell(rank=6, world_size=7, use_orig_params=False),
    "the gradient of a unit of which a rank holds only padding is dropped with every forward": _cell(
        rank=1,
        sizes={"family": Family.GPT2, "hidden_size": 3, "num_attention_heads": 1}
        | {"intermediate_size": 73, "num_hidden_layers": 2},
        world_size=3,
        precision=Precision.parse("bf16-mixed-bf16-reduce"),
        wrap=Wrap.SIZE,
        min_num_params=1,
        gradient_accumulation_steps=2,
    ),
    "another rank of a hybrid group": _cell(rank=7, world_size=8, strategy=ShardingStrategy.HYBRID_SHARD),
}


SLOW = {
    "a root whose parameters are all in units below has no flat parameter",
    "fully_shard's parameters are filled in the model's order",
    "a matrix of one column is no vector",
}
"""The others have all wrappers, and the ranks that differ from rank 0."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CELLS])
def test_prediction_dry_run_and_real_tensors_have_equal_peaks_in_every_phase(name: str) -> None:
    assert_equals_dry_runs(CELLS[name], "cpu", has_real_tensors=True)


def test_the_peak_of_loading_grows_with_blocks_that_are_not_simulated() -> None:
    """Several units in one block repeat together, each filled from a whole parameter while another one is alive."""
    cell = CELLS["fully_shard's parameters are filled in the model's order"]
    three, twelve = (replace(cell.model, num_hidden_layers=layers) for layers in (3, 12))
    load = [memory_of(model, cell.setup, CPU).phases["load"] for model in (three, twelve)]
    per_block = -(-three.num_block_parameters // 12) * 4  # fp32 shards of this world, rounded up
    assert 0 < load[1] - load[0] < 9 * 3 * per_block


def test_a_dry_run_of_a_rank_beyond_the_world_is_refused() -> None:
    cell = _cell()
    with pytest.raises(SpecError, match="rank"):
        DryRunSpec(model=cell.model, setup=cell.setup, rank=2)
