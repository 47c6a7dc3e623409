"""The fewest GPUs on which anything fits that a plan tries: what ``max-size --of gpus`` and ``plan`` both name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.plan.purchase.beyond import MOST_NODES
from fsdp_bench.plan.purchase.fastest import Fastest
from fsdp_bench.plan.purchase.goal import Goal
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.simulate.step import without_collections


def fewest_gpus(goal: Goal, kind: ServerType, nodes: Sequence[int] = range(1, MOST_NODES + 1)) -> Prediction | None:
    """Return a setting that fits the fewest nodes, or GPUs of one node, at the smallest micro-batch; None if none does.

    Live bytes say on how many nodes something may fit. From there on PyTorch's allocator decides, up to twice as many.
    """
    fastest = Fastest(Simulated(goal, max(nodes)), kind.server, kind.gpu, kind.gpus_per_node)
    with without_collections():
        first = bisect_left(nodes, True, key=fastest.anything_fits)
        for count in nodes[first : 2 * first + 2]:
            if (found := fastest.smallest_that_fits(count)) is not None:
                return found if count > 1 else _of_one_node(goal, kind, found)
    return None


def _of_one_node(goal: Goal, kind: ServerType, found: Prediction) -> Prediction:
    for each in reversed(range(1, kind.gpus_per_node)):
        fewer = Fastest(Simulated(goal, 1), kind.server, kind.gpu, each).smallest_that_fits(1)
        if fewer is None:
            break
        found = fewer
    return found
