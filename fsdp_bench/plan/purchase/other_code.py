"""OtherCode: what the winner's servers cost with the same model in other code, transformers' or the benchmark's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_bench.plan.purchase.fastest import Timed
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.searched import Searched, ServerType
from fsdp_bench.plan.purchase.settings import can_run
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.spec.recording.model import Model, code_of


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
