"""``predict`` advises the fewest nodes that ``plan`` finds."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from fsdp_bench import plan_training
from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.advice.remedies import remedies
from fsdp_bench.plan.purchase.planner import NODES
from fsdp_bench.plan.question import Question, answer
from fsdp_bench.spec.setup import Precision, TrainSetup


@pytest.mark.parametrize(
    ("name", "where", "nodes"),
    [
        ("Llama-3.1-8B", "g5.48xlarge", range(1, 5)),
        pytest.param("Llama-3.1-8B", "g5.48xlarge", NODES, marks=pytest.mark.slow),
        pytest.param("30B", "p4d.24xlarge", NODES, marks=pytest.mark.slow),
        pytest.param("Llama-3.1-70B", "p4de.24xlarge", NODES, marks=pytest.mark.slow),
    ],
)
def test_the_fewest_nodes_are_those_that_predict_advises(name: str, where: str, nodes: Iterable[int]) -> None:
    setup = TrainSetup(world_size=8, sequence_length=4096, precision=Precision.parse("bf16-mixed"))
    advised = remedies(answer(Question(model(name, 4096), setup, server(where))))
    advised_nodes = [int(found[1]) for one in advised if (found := re.search(r"--nodes (\d+)", one.switch))]
    fixed = {"sequence_length": 4096, "offload": "none", "micro_batch_size": 1}
    planned = plan_training(name, servers=[where], nodes=nodes, **fixed).picked.fewest_nodes
    assert planned is not None
    assert min(advised_nodes) == planned.cluster.num_nodes
