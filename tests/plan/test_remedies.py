"""Advice: the fewest nodes that fit, found without skipping counts, and settings of every kind, cheapest first."""

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.remedies import GPUS, Alternative, Remedy, fewest, larger_worlds, remedies
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, TrainSetup

LLAMA_70B = BUILT_IN.model("Llama-3.1-70B").shape()


def asked(nodes: int = 1, host_memory_bytes: int | None = None, **fields: object) -> Question:
    server = BUILT_IN.server("p4de.24xlarge")
    server = replace(server, host_memory_bytes=host_memory_bytes or server.host_memory_bytes)
    where = Hardware(server=server, gpu=BUILT_IN.gpu(server.gpu), num_nodes=nodes, gpus_per_node=8)
    step = {"precision": Precision.parse("bf16-mixed"), "sequence_length": 4096}
    setup = TrainSetup(world_size=8 * nodes, **step, **fields)
    return Question(LLAMA_70B, setup, where)


@pytest.fixture(scope="module")
def advice() -> list[Remedy]:
    """For a 70B on one node, without checkpointing."""
    return remedies(answer(asked()))


def test_advice_is_sorted_by_gpus_and_then_by_time_and_all_of_it_fits(advice: list[Remedy]) -> None:
    assert len(advice) > 1
    for remedy in advice:
        assert answer(remedy.prediction.question).fits  # as predict answers it, with plain rules
    assert [remedy.cost for remedy in advice] == sorted(remedy.cost for remedy in advice)


def test_where_the_hosts_memory_runs_out_advice_comes_too() -> None:
    question = asked(offload=Offload.PARAMS, checkpointing=Checkpointing.FULL, api=Api.FSDP2)
    prediction = answer(question)
    assert prediction.fits is False
    assert prediction.allocator.out_of_memory is None
    found = remedies(prediction)
    assert any(remedy.switch == "--nodes 2" for remedy in found)
    assert any("--offload none" in remedy.switch for remedy in found)


def test_the_fewest_is_the_fewest_also_where_needs_do_not_fall_at_every_step() -> None:
    worlds = list(range(8, 800, 8))
    asked_for: list[int] = []

    def holds(index: int) -> bool:
        asked_for.append(index)
        return worlds[index] == 96 or worlds[index] >= 112  # and not on 104

    assert fewest(worlds, lambda index: worlds[index] >= 40, holds) == 96
    assert len(asked_for) < 12
    assert fewest(worlds, lambda _index: True, lambda index: worlds[index] >= 792) == 792
    assert fewest(worlds, lambda _index: False, holds) is None
    assert fewest(worlds, lambda _index: True, lambda _index: False) is None
    assert fewest([], lambda _index: True, lambda _index: True) is None


def test_more_gpus_are_a_full_node_first_and_then_every_number_of_nodes() -> None:
    server = BUILT_IN.server("p4de.24xlarge")
    two = Hardware(server=server, gpu=BUILT_IN.gpu(server.gpu), gpus_per_node=2)
    question = Question(LLAMA_70B, TrainSetup(world_size=2), two)
    assert larger_worlds(question)[:8] == [3, 4, 5, 6, 7, 8, 16, 24]
    for world, option in ((5, "--gpus-per-node 5"), (24, "--nodes 3")):
        larger = Alternative(question).on_world(world)
        assert larger.switches == {GPUS: option}
        assert larger.question.hardware.world_size == larger.question.setup.world_size == world


def test_a_remedy_without_a_known_time_is_sorted_behind_those_with_one() -> None:
    known = Remedy("--checkpointing full", answer(asked(5, checkpointing=Checkpointing.FULL)))
    failing = Remedy("--offload params", answer(asked(5)))
    assert known.cost < failing.cost
