"""Picks from offers: the winner and why, the cheapest, the fastest, and those that no other beats in price and time.

Beside the winner stand the same model in other code, transformers' or the benchmark's, on its servers, and an offer
that fits even with the highest peak that other frameworks' code took.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Generic, TypeVar

from fsdp_bench.plan.purchase.fastest import Timed
from fsdp_bench.plan.purchase.goal import SECONDS_PER_DAY, Terms, can_run, settings
from fsdp_bench.plan.purchase.offer import Offer, SettingOffer
from fsdp_bench.plan.purchase.searched import Searched, ServerType
from fsdp_bench.plan.purchase.simulated import Simulated
from fsdp_bench.plan.ranges import peak_range
from fsdp_bench.spec.recording.model import Model, code_of
from fsdp_bench.spec.setup import ShardingStrategy

OfferT = TypeVar("OfferT", bound=Offer)

CHEAP = 0.05
"""Without a deadline the winner is the fastest offer that costs at most so much more than the cheapest."""
SAME = 0.01
"""With a deadline, prices that differ by less count as the same: the fewest GPUs of these win."""
FASTER = 2.0
"""The Pareto set is shown in steps: each offer is at least so many times as fast as the one before."""


@dataclass(frozen=True)
class Picked(Generic[OfferT]):
    """The offers that an answer shows."""

    winner: OfferT | None
    cheapest_allowed: OfferT | None
    """The cheapest that meets the deadline and the budget; None without them."""
    cheapest: OfferT | None
    """None if no price is known."""
    fastest: OfferT | None
    fewest_nodes: OfferT | None
    pareto: tuple[OfferT, ...]
    """Offers that no other beats in both price and time, the cheapest first, in steps of FASTER."""
    nearest: tuple[OfferT, ...]
    """If there is no winner: the offers that come nearest to what was asked."""
    safest: OfferT | None = None
    """Servers like the winner's with a setting that fits even with the highest peak that other frameworks' code took.

    None if there is no winner or no such setting."""

    def single(self) -> dict[str, OfferT | None]:
        """Return the offers that stand alone, by name, the winner first."""
        names = ("winner", "safest", "cheapest_allowed", "cheapest", "fastest", "fewest_nodes")
        return {name: getattr(self, name) for name in names}

    def all(self) -> list[OfferT]:
        """Return every offer once, the winner first."""
        found = (*self.single().values(), *self.pareto, *self.nearest)
        return list({one.identity: one for one in found if one is not None}.values())


def pick(goal: Terms, offers: Sequence[OfferT]) -> Picked[OfferT]:
    """Pick from all offers of a goal."""
    met = [offer for offer in offers if offer.meets_deadline and offer.meets_budget]
    like_published = [offer for offer in met if offer.range is not None and offer.range.is_like_published]
    allowed = like_published or met
    priced = [offer for offer in offers if offer.per_hour is not None]
    is_bound = goal.deadline_seconds is not None or goal.budget is not None
    return Picked(
        winner=_winner(goal, allowed),
        cheapest_allowed=_least(allowed, _cost) if is_bound else None,
        cheapest=_least(priced, _cost),
        fastest=_least(offers, lambda offer: -offer.tokens_per_second),
        fewest_nodes=_least(offers, lambda offer: (offer.cluster.num_nodes, offer.cluster.world_size, _cost(offer))),
        pareto=_pareto(priced),
        nearest=() if allowed else _nearest(goal, offers),
    )


def _winner(goal: Terms, allowed: Sequence[OfferT]) -> OfferT | None:
    if goal.deadline_seconds is not None:  # of those that cost nearly the same, the fewest GPUs
        least = _least(allowed, _cost)
        alike = [offer for offer in allowed if least is None or _cost(offer) <= (1 + SAME) * _cost(least)]
        return _least(alike, lambda offer: (offer.cluster.world_size, _cost(offer)))
    if goal.budget is not None:
        return _least(allowed, lambda offer: -offer.tokens_per_second)
    cheapest = _least(allowed, _cost)
    if cheapest is None:
        return None
    if _cost(cheapest) == inf:
        return _least(allowed, lambda offer: (-offer.tokens_per_second_per_gpu, offer.cluster.world_size))
    cheap = [offer for offer in allowed if _cost(offer) <= (1 + CHEAP) * _cost(cheapest)]
    if goal.tokens is None:
        return _least(cheap, lambda offer: (offer.cluster.world_size, _cost(offer)))
    return _least(cheap, lambda offer: -offer.tokens_per_second)


def _cost(offer: Offer) -> float:
    cost = offer.cost_per_billion_tokens
    return inf if cost is None else cost


def _least(offers: Sequence[OfferT], key: Callable[[OfferT], object]) -> OfferT | None:
    return min(offers, key=key, default=None)  # type: ignore[arg-type]


def _pareto(offers: Sequence[OfferT]) -> tuple[OfferT, ...]:
    found: list[OfferT] = []
    for offer in sorted(offers, key=lambda one: (_cost(one), -one.tokens_per_second)):
        if not found or offer.tokens_per_second > FASTER * found[-1].tokens_per_second:
            found.append(offer)
    return tuple(found)


def _nearest(goal: Terms, offers: Sequence[OfferT]) -> tuple[OfferT, ...]:
    in_time = [offer for offer in offers if offer.meets_deadline]
    paid = [offer for offer in offers if offer.meets_budget]
    found = [_least(offers, lambda offer: -offer.tokens_per_second)]
    if goal.budget is not None:
        found.append(_least(in_time, _cost))
        found.append(_least(paid, lambda offer: -offer.tokens_per_second))
    return tuple({one.key: one for one in found if one is not None}.values())


def reason_of(goal: Terms, picked: Picked[OfferT], num_offers: int) -> str:
    """Return why the winner won, or why nobody did and what would have to change."""
    winner = picked.winner
    if num_offers == 0:
        return "nothing fits"
    if winner is None:
        return _why_none(goal, picked)
    if goal.deadline_seconds is not None:
        return _why_in_time(goal, picked, winner, num_offers)
    many = f"of {num_offers:,} that fit" if num_offers > 1 else "and the only one that fits"
    if goal.budget is not None:
        return f"the fastest within the budget, {_how_sure(winner)}, {many}"
    if winner.per_hour is None:
        return f"the most tokens per second of one GPU, {many}; no price is known"
    if goal.tokens is None:
        return f"the fewest GPUs that cost at most {CHEAP:.0%} more a token than the cheapest, {many}"
    return f"the fastest that costs at most {CHEAP:.0%} more than the cheapest, {many}"


def _why_in_time(goal: Terms, picked: Picked[OfferT], winner: OfferT, num_offers: int) -> str:
    kept = "the deadline" if goal.budget is None else "the deadline and the budget"
    if num_offers == 1:
        return f"no other offer fits, and it meets {kept}, {_how_sure(winner)}"
    least = picked.cheapest_allowed
    if least is None or least.cost is None:
        why = f"This one needs the fewest GPUs of those that meet {kept}, {_how_sure(winner)}"
    else:
        cost = f"{least.cost:,.0f} {least.currency or ''}".rstrip()
        why = (
            f"Those that meet {kept}, {_how_sure(winner)}, cost at least {cost} (predicted); this one needs the"
            f" fewest GPUs within {SAME:.0%} of that"
        )
    return f"{num_offers:,} offers fit. {why}"


def _how_sure(offer: Offer) -> str:
    if offer.range is None:
        return "as predicted"
    if not offer.range.is_like_published:
        return f"even {offer.range.slowest:.2g} times as fast as predicted, as {offer.range.because.partition(':')[0]}"
    return "even at the slow end of the range"


def _why_none(goal: Terms, picked: Picked[OfferT]) -> str:
    fastest = picked.fastest
    assert fastest is not None
    assert fastest.slow_seconds is not None
    parts = []
    is_late = goal.deadline_seconds is not None and fastest.slow_seconds > goal.deadline_seconds
    if is_late:
        days = fastest.slow_seconds / SECONDS_PER_DAY
        parts.append(f"the fastest takes {days:,.1f} days at the slow end: --deadline {days + 0.5:.0f}d, or more nodes")
    if goal.budget is not None:
        costs = [one.slow_cost for one in picked.nearest if is_late or one.meets_deadline]
        cost = min((one for one in costs if one is not None), default=None)
        if cost is None:
            parts.append("no price is known: --price 2.10/gpu-hour states one")
        elif cost > goal.budget:
            in_time = " in time" if goal.deadline_seconds is not None and not is_late else ""
            parts.append(f"the cheapest{in_time} costs {cost:,.0f} at the slow end: --budget {cost / 1000 + 0.5:.0f}k")
    return "; ".join(parts) or "nothing meets both the deadline and the budget"


# -- Beside the winner: other code on its servers, and an offer that fits even with a higher peak ----------------------


@dataclass(frozen=True)
class OtherCode:
    """The winner's servers with the same model in other code."""

    code: str
    """Whose: ``huggingface`` or ``benchmark``."""
    offer: SettingOffer | None
    """The winner's setting if it fits, else the fastest that does; None if nothing does."""
    is_same_setting: bool


def with_other_code(winner: SettingOffer, model: Model, kind: ServerType) -> OtherCode:
    """Return the offer on the winner's servers with other code. If its setting does not fit, others are searched."""
    goal, code = replace(winner.goal, model=model, other=None), code_of(model)
    setup, cluster = winner.timed.setup, winner.cluster
    simulated = Simulated(goal, cluster.num_nodes)
    seconds = simulated.step_seconds(setup, cluster) if can_run(goal, setup) else None
    if seconds:
        timed = Timed(cluster, setup, setup.tokens_per_step_per_rank / seconds)
        for segments in dict.fromkeys((winner.expandable_segments, True)):
            offer = SettingOffer(goal=goal, timed=timed, price=winner.price, expandable_segments=segments)
            if offer.prediction.fits:
                return OtherCode(code, offer, True)
    nodes = cluster.num_nodes
    return OtherCode(code, Searched(simulated, kind, (nodes,)).offer(nodes), False)


def safest(winner: SettingOffer, searched: Searched) -> SettingOffer | None:
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
