"""Answers that a plan has beside the winner: other code on its servers, and an offer that fits even with a higher peak.

Other code is the same model's: transformers' or the benchmark's. The higher peak is the highest that other frameworks'
code took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from fsdp_bench.plan.purchase.fastest import Timed
from fsdp_bench.plan.purchase.goal import can_run, settings
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.searched import Searched, ServerType
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.plan.ranges import peak_range
from fsdp_bench.spec.recording.model import Model, code_of
from fsdp_bench.spec.setup import ShardingStrategy


@dataclass(frozen=True)
class OtherCode:
    """The winner's servers with the same model in other code."""

    code: str
    """Whose: ``huggingface`` or ``benchmark``."""
    offer: Offer | None
    """The winner's setting if it fits, else the fastest that does; None if nothing does."""
    is_same_setting: bool


def with_other_code(winner: Offer, model: Model, kind: ServerType) -> OtherCode:
    """Return the offer on the winner's servers with other code. If its setting does not fit, others are searched."""
    goal, code = replace(winner.goal, model=model, other=None), code_of(model)
    setup, cluster = winner.timed.setup, winner.cluster
    simulated = Simulated(goal, cluster.num_nodes)
    seconds = simulated.step_seconds(setup, cluster) if can_run(goal, setup) else None
    if seconds:
        timed = Timed(cluster, setup, setup.tokens_per_step_per_rank / seconds)
        for segments in dict.fromkeys((winner.expandable_segments, True)):
            offer = Offer(goal, timed, winner.price, segments)
            if offer.prediction.fits:
                return OtherCode(code, offer, True)
    nodes = cluster.num_nodes
    return OtherCode(code, Searched(simulated, kind, (nodes,)).offer(nodes), False)


def safest(winner: Offer, searched: Searched) -> Offer | None:
    """Return the winner if it fits with the highest peak that its range leaves, else an offer that does; None if none.

    Searched are the winner's strategy and FULL_SHARD under its api: on its number of nodes, and, where that misses the
    deadline, on as many more as the days are too many.
    """
    span = peak_range(winner.timed.setup.compile)
    if span is None or winner.fits_if_higher(span.highest):
        return winner if span is not None else None
    setup = winner.timed.setup
    strategies = {setup.strategy, ShardingStrategy.FULL_SHARD}
    among = [one for one in settings(winner.goal) if one.api is setup.api and one.strategy in strategies]
    sparing = searched.sparing(span.highest, among)
    limit, count = winner.goal.deadline_seconds, winner.cluster.num_nodes
    while (nodes := next((one for one in sparing.nodes if one >= count), None)) is not None:
        offer = sparing.offer(nodes)
        if offer is not None and (limit is None or offer.meets_deadline or nodes == sparing.nodes[-1]):
            return offer
        late = 1.0 if offer is None or limit is None else (offer.slow_seconds or 0.0) / limit
        count = max(ceil(nodes * late), nodes + 1)
    return None
