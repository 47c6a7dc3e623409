"""The bounds by which settings are not timed, against their times."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import model
from fsdp_bench.plan.purchase.fastest import Fastest
from fsdp_bench.plan.purchase.goal import Goal, Setting, can_run, settings, setup_of
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.spec.setup import Loss, Precision

FIXED: dict[str, Any] = {"precision": Precision.parse("bf16-mixed"), "sequence_length": 1024, "loss": Loss.PLAIN}


@cache
def _fastest(name: str, server: str, times_memory: float = 1.0) -> Fastest:
    shape = model(name, 1024)
    given, where = Goal(shape.with_blocks(8), fixed=FIXED), BUILT_IN.server(server)
    return Fastest(Simulated(given, 64), where, BUILT_IN.gpu(where.gpu), where.gpus_per_node, times_memory)


@given(
    name=st.sampled_from(["Llama-3.2-1B", "Llama-2-7B", "gpt2"]),
    server=st.sampled_from(["g5.48xlarge", "p4d.24xlarge", "p5.48xlarge"]),
    data=st.data(),
    batch=st.sampled_from([1, 2, 8]),
    counts=st.lists(st.integers(1, 64), min_size=2, max_size=4, unique=True),
)
def test_no_setting_is_faster_than_what_it_reached_on_other_nodes_allows(
    name: str, server: str, data: st.DataObject, batch: int, counts: list[int]
) -> None:
    fastest = _fastest(name, server)
    setting: Setting = data.draw(st.sampled_from(settings(fastest.goal)))
    made = [(count, setup_of(fastest.goal, setting, batch, count, fastest.gpus_per_node)) for count in counts]
    setups = [(count, one) for count, one in made if one is not None and can_run(fastest.goal, one)]
    if not setups:
        return
    (count, asked), *others = setups
    for nodes, other in others:
        fastest._speed(other, fastest.cluster(nodes))
    fastest.reached.pop(asked, None)
    fastest._alike.get((setting, batch), {}).pop(count, None)
    bound = fastest.bound_by_others(asked)
    assert fastest._speed(asked, fastest.cluster(count)) <= bound


@pytest.mark.parametrize("server", ["g5.48xlarge", pytest.param("p4d.24xlarge", marks=pytest.mark.slow)])
def test_the_best_is_the_fastest_of_all_that_may_fit(server: str) -> None:
    """``best`` times few of them: bounds say that the others are slower, the more so the more nodes it knows."""
    name = "Llama-3.2-1B"
    lazy, whole = _fastest(name, server, 1.0 + 1e-9), _fastest(name, server)
    before = len(whole.reached)
    for count in (64, 2, 3, 17):
        cluster = whole.cluster(count)
        candidates = whole._candidates(cluster, settings(whole.goal))
        most = max(whole._speed(setup, cluster) for _, setup in candidates)
        best = lazy.best(count)
        assert best.tokens_per_second_per_gpu == most
    assert len(lazy.reached) < (len(whole.reached) - before) / 2
