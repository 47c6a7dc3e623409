"""Bytes that a step sends, against real ranks and recorded trials; and ratios that must hold."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.estimate import KERNELS
from fsdp_bench.rates.collectives import collective_seconds, groups_of
from fsdp_bench.rates.datasheet import datasheet
from fsdp_bench.replay.traffic import Traffic, collectives, traffic
from fsdp_bench.simulate.events import Work
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import Api, Checkpointing, Precision, ShardingStrategy, TrainSetup, Wrap
from fsdp_bench.sweep.results.load import read_records
from tests.profiles import validating
from tests.shapes import shape
from tests.train.measuring.test_fake_group import count_with_peers, setups_of
from tests.train.ranks import call_standing_ranks
from tests.train.training import LLAMA, S, setup_of

RESULTS = Path(__file__).parents[2] / "results"
MORE = [
    setup_of(4, api=api, strategy=strategy, precision=Precision.parse("fp16-mixed"), max_grad_norm=1.0)
    for api in Api
    for strategy in (S.HYBRID_SHARD, S.FULL_SHARD)
] + [
    setup_of(4, api=Api.FSDP1, wrap=Wrap.NONE),
    setup_of(4, api=Api.FSDP2, strategy=S.FULL_SHARD, checkpointing=Checkpointing.SELECTIVE),
]
"""On four ranks, where the world is no pair: the scaler's and the norm's collectives, one unit, recomputation."""


def collectives_of(model: ModelShape, setup: TrainSetup, kernels: Kernels = CUDA) -> list[Work]:
    return collectives(SimulatedSteps(model, setup, kernels).step())


def sent(model: ModelShape, setup: TrainSetup) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Calls, bytes and group sizes by kind, as tests/train/measuring/test_fake_group.py counts them."""
    found: dict[str, list[Traffic]] = {}
    for one in traffic(collectives_of(model, setup, KERNELS["cpu"]), setup):
        found.setdefault(one.kind, []).append(one)
    return {
        kind: (
            sum(one.calls for one in several),
            sum(one.message_bytes for one in several),
            tuple(sorted({one.group_size for one in several})),
        )
        for kind, several in found.items()
    }


@pytest.mark.parametrize("world_size", [2, 4])
def test_real_ranks_send_what_is_predicted(world_size: int) -> None:
    setups = setups_of(world_size) + (MORE[:: 1 if validating() else 2] if world_size == 4 else [])
    for rank in call_standing_ranks(world_size, count_with_peers, setups):
        for setup, (counted, _) in zip(setups, rank, strict=True):
            assert sent(LLAMA, setup) == counted, setup


MEASURED = [
    record
    for record in read_records(RESULTS / "xeon-2-cores" / "cpu")
    if any(rank.communication for rank in record.ranks)
]
assert len(MEASURED) == 54  # trials whose communication was profiled


@pytest.mark.parametrize("record", MEASURED, ids=lambda record: record.id)
def test_the_committed_trials_sent_what_is_predicted(record: TrialRecord) -> None:
    for reading in (reading for rank in record.ranks for reading in rank.communication):
        counted = {one.kind: (one.calls, one.message_bytes, (one.group_size,)) for one in reading.collectives}
        assert sent(record.model, record.setup) == counted


def of(strategy: ShardingStrategy, world_size: int = 8, **fields: object) -> TrainSetup:
    return TrainSetup(strategy=strategy, world_size=world_size, sequence_length=128, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("api", list(Api))
@given(steps=st.integers(1, 9), synced=st.booleans())
def test_every_micro_batch_gathers_and_reduces_only_where_it_is_told_to(api: Api, steps: int, synced: bool) -> None:
    model = shape(num_hidden_layers=3)
    once = sent(model, of(S.FULL_SHARD, api=api))
    setup = of(S.FULL_SHARD, api=api, gradient_accumulation_steps=steps, sync_every_micro_batch=synced)
    many = sent(model, setup)
    assert many["all_gather"][0] == steps * once["all_gather"][0]
    assert many["reduce_scatter"][:2] == tuple((steps if synced else 1) * count for count in once["reduce_scatter"][:2])


def test_one_rank_sends_nothing() -> None:
    assert collectives_of(shape(num_hidden_layers=2), of(S.FULL_SHARD, 1)) == []


def test_the_time_of_traffic_is_the_sum_of_its_collectives() -> None:
    cluster = server("DGX-A100", 2)
    setup = of(S.HYBRID_SHARD, 16, shard_size=8, gradient_accumulation_steps=5)
    issued, groups = collectives_of(shape(num_hidden_layers=4), setup), groups_of(cluster, setup)
    topologies = {"shard": groups.shard, "replicate": groups.replicate}
    each = [collective_seconds(one.name, one.num_bytes, topologies[one.group]) for one in issued]  # type: ignore[arg-type]
    rates = datasheet(cluster, setup)
    total = sum(one.seconds or 0.0 for one in traffic(issued, setup, rates))
    assert total == pytest.approx(sum(each))
    assert all(one.seconds is None for one in traffic(issued, setup))
