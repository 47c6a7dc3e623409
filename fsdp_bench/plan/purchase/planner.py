"""All offers of a goal; the winner, the cheapest, the fastest, and those that no other beats in both.

A kind of server is searched when one of its offers is picked, with the speed that its GPU does not exceed. So what
cannot win is never searched, and what is picked in the end was searched and fits by the allocator's simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_bench.plan.purchase.fastest import Simulated
from fsdp_bench.plan.purchase.goal import Goal
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.pick import Picked, pick, reason_of
from fsdp_bench.plan.purchase.searched import Kind, Searched
from fsdp_bench.spec.hardware import Server

NODES = range(1, 65)
"""The numbers of nodes that are looked at, if the user names none."""


@dataclass(frozen=True)
class Left:
    """A kind of server that has no offer, and why."""

    server: Server
    reason: str


@dataclass(frozen=True)
class Plan:
    """The answer to a goal."""

    goal: Goal
    picked: Picked
    reason: str
    """Why the winner, or why there is none."""
    left_out: tuple[Left, ...]
    num_offers: int
    """Kinds of servers and numbers of nodes on which something fits."""


def plan(
    goal: Goal,
    kinds: Sequence[Kind],
    nodes: Sequence[int] = NODES,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Find the best servers, their number and their setting.

    Args:
        goal: what is asked for.
        kinds: the servers to choose from.
        nodes: the numbers of nodes to choose from.
        progress: called with each kind of server that is begun.
    """
    simulated, searched, left = Simulated(goal, max(nodes)), list[Searched](), list[Left]()
    for kind in kinds:
        progress(kind.server.name)
        reason = _why_unknown(kind)
        if reason is None:
            found = Searched(simulated, kind, sorted(set(nodes)))
            reason = _why_no_offer(found, max(nodes))
        if reason is None:
            searched.append(found)
        else:
            left.append(Left(kind.server, reason))
    return _Choice(goal, searched, left, progress).plan()


def _why_unknown(kind: Kind) -> str | None:
    if kind.gpu.usable_memory_bytes is None:
        return "nobody documents how much memory of its GPU can be used"
    if not kind.gpu.native_bf16:
        return "its GPU has no bf16 and no FlashAttention"
    return None


def _why_no_offer(found: Searched, most: int) -> str | None:
    if not found.nodes:
        return f"nothing fits on up to {most} nodes"
    return None if found.bound else "its speed is not known: no datasheet has its rates"


class _Choice:
    """Chooses from drafts until what is chosen is no draft."""

    def __init__(
        self, goal: Goal, searched: Sequence[Searched], left: list[Left], progress: Callable[[str], None]
    ) -> None:
        self._goal, self._left, self._progress = goal, left, progress
        self._searched = {each.kind.server.name: each for each in searched}
        self._made: dict[tuple[str, int], Offer | None] = {}

    def plan(self) -> Plan:
        """Return the plan."""
        while True:
            offers = self._offers()
            picked = pick(self._goal, offers)
            unsearched = [each for offer in picked.all() if not (each := self._kind_of(offer)).is_searched]
            if unsearched:
                self._search(unsearched[0])
            elif all(offer.key in self._made for offer in picked.all()):
                break
            else:
                self._made |= {
                    offer.key: self._kind_of(offer).offer(offer.cluster.num_nodes)
                    for offer in picked.all()
                    if offer.key not in self._made
                }
        return Plan(self._goal, picked, reason_of(self._goal, picked, len(offers)), tuple(self._left), len(offers))

    def _kind_of(self, offer: Offer) -> Searched:
        return self._searched[offer.cluster.server.name]

    def _offers(self) -> list[Offer]:
        drafts = [self._made.get(draft.key, draft) for each in self._searched.values() for draft in each.drafts()]
        return [offer for offer in drafts if offer is not None]

    def _search(self, kind: Searched) -> None:
        server = kind.kind.server
        self._progress(server.name)
        kind.search()
        if not kind.has_offers:
            self._left.append(Left(server, "its speed is not known: nothing says how its GPUs or nodes are connected"))
