"""safest(): an offer on the winner's kind of server that fits even if its peak is as high as other frameworks' were."""

from __future__ import annotations

from math import ceil

from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.searched import Searched
from fsdp_bench.plan.purchase.settings import settings
from fsdp_bench.plan.ranges import peak_range
from fsdp_bench.spec.setup import ShardingStrategy


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
