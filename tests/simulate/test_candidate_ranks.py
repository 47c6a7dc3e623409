"""The rank that needs the most memory, which under FSDP1 is not always rank 0; and gloo's copies, on real ranks."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.operators.kernels import CPU, CPU_GLOO, CUDA
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, OptimizerKind, ShardingStrategy, TrainSetup, Wrap
from tests.shapes import memory_of, shape
from tests.train.dry_run.test_fake_world import measured_phases
from tests.train.ranks import run_ranks
from tests.train.training import SHAPES
from tools.validate.random_setups import Cell, draw_cells

UNEVEN = shape(
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 512},
    **{"vocab_size": 31, "max_position_embeddings": 16},
)
"""In a world of two, rank 1 has the largest pieces of parameters."""
FOR_LOOP = TrainSetup(world_size=2, sequence_length=8, optimizer=OptimizerKind.ADAMW_FOR_LOOP)


def _sharded_fsdp1() -> list[Cell]:
    cells = draw_cells(300, 5, "cuda", small=True)
    return [c for c in cells if c.setup.api is Api.FSDP1 and 1 < c.setup.shard_group_size <= 8][:25]


@pytest.mark.parametrize("kernels", [CPU, CUDA], ids=["cpu", "cuda"])
def test_no_rank_needs_more_than_the_predicted_one(kernels) -> None:  # type: ignore[no-untyped-def]
    """Against every rank simulated; in some cells it is another one than rank 0."""
    others = 0
    for cell in _sharded_fsdp1():
        found = memory_of(cell.model, cell.setup, kernels)
        ranks = range(cell.setup.shard_group_size)
        peaks = [memory_of(cell.model, cell.setup, kernels, rank).peak_allocated_bytes for rank in ranks]
        assert (found.peak_allocated_bytes, found.peak_rank) == (max(peaks), peaks.index(max(peaks))), cell.label
        others += found.peak_rank != 0
    assert others > 0


def _measure(setups: dict[str, TrainSetup]) -> dict[str, dict[str, int]]:
    SHAPES[Family.LLAMA] = UNEVEN
    return {name: measured_phases(Family.LLAMA, setup) for name, setup in setups.items()}


def test_each_rank_is_predicted_as_real_ranks_are_with_what_gloo_copies(tmp_path: Path) -> None:
    """tests/train/dry_run/test_fake_world.py compares dry runs with ranks, without these copies."""
    fsdp2 = replace(FOR_LOOP, api=Api.FSDP2)
    setups = {"block": FOR_LOOP, "none": replace(FOR_LOOP, wrap=Wrap.NONE), "fsdp2": fsdp2}
    setups["ddp"] = replace(fsdp2, strategy=ShardingStrategy.NO_SHARD)
    ranks = run_ranks(2, tmp_path, _measure, setups)
    for name, setup in setups.items():
        for rank in (0, 1) if setup.api is Api.FSDP1 else (0,):  # elsewhere no rank needs more than rank 0
            predicted = memory_of(UNEVEN, setup, CPU_GLOO, rank).phases
            assert {phase: predicted[phase] for phase in ranks[rank][name]} == ranks[rank][name], (name, rank)
    assert ranks[1]["block"]["optimizer"] > ranks[0]["block"]["optimizer"]


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD])
def test_rank_0_is_predicted_where_no_rank_needs_more(strategy: ShardingStrategy) -> None:
    setup = TrainSetup(world_size=2, sequence_length=8, strategy=strategy, api=Api.FSDP2)
    assert memory_of(UNEVEN, setup, CPU).peak_rank == 0
