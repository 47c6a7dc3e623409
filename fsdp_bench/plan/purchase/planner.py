"""All offers of a goal; the winner, the cheapest, the fastest, and those that no other beats in both.

On each kind of server the fastest setting is searched on few numbers of nodes. Between two of them the speed of one GPU
is interpolated, to choose which offers to look at. Those are searched on their own number of nodes, and their memory is
simulated with PyTorch's caching allocator; what does not fit is refused, and the choice is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from fsdp_bench.plan.purchase.fastest import Fastest, Simulated, Timed
from fsdp_bench.plan.purchase.goal import Goal
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.pick import Picked, pick, reason_of
from fsdp_bench.plan.purchase.settings import Setting, setting_of
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.price import Price

NODES = range(1, 65)
"""The numbers of nodes that are looked at, if the user names none."""
_GOOD = 4
"""So many of the fastest settings on the fewest and on the most nodes are timed between them."""


@dataclass(frozen=True)
class Kind:
    """One kind of server."""

    server: Server
    gpu: Gpu
    price: Price | None
    gpus_per_node: int


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
    simulated, searched, left = Simulated(goal, max(nodes)), list[_Searched](), list[Left]()
    for kind in kinds:
        progress(kind.server.name)
        if (reason := _why_unknown(kind)) is not None:
            left.append(Left(kind.server, reason))
            continue
        found = _Searched(simulated, kind, sorted(set(nodes)))
        if found.is_empty:
            left.append(Left(kind.server, f"nothing fits on up to {max(nodes)} nodes"))
        elif found.is_timeless:
            left.append(Left(kind.server, "its speed is not known: no datasheet has its rates"))
        else:
            searched.append(found)
    return _Choice(goal, searched, tuple(left)).plan()


def _why_unknown(kind: Kind) -> str | None:
    if kind.gpu.usable_memory_bytes is None:
        return "nobody documents how much memory of its GPU can be used"
    if not kind.gpu.native_bf16:
        return "its GPU has no bf16 and no FlashAttention"
    return None


class _Searched:
    """The offers of one kind of server."""

    def __init__(self, simulated: Simulated, kind: Kind, nodes: Sequence[int]) -> None:
        self.goal, self.kind, self.nodes = simulated.goal, kind, nodes
        self._fastest = Fastest(simulated, kind.server, kind.gpu, kind.gpus_per_node)
        self._known: dict[int, Timed | None] = {}
        """The fastest found on some numbers of nodes."""
        self._whole: set[int] = set()
        """The numbers of nodes on which all settings were looked at."""
        self._good: dict[Setting, None] = {}
        """The settings that were among the fastest."""
        for count in dict.fromkeys((nodes[-1], nodes[0])):
            self._search(count)
        self._fill_first()
        for count in nodes[1:-1]:
            if count & (count - 1) == 0 and count not in self._known and self.first is not None and count > self.first:
                self._search(count, whole=False)

    def _search(self, count: int, whole: bool = True) -> Timed | None:
        if count in self._whole or (count in self._known and not whole):
            return self._known[count]
        found = self._fastest.on(count, None if whole else list(self._good))
        self._known[count] = found[0] if found else None
        if whole:
            self._whole.add(count)
            self._good |= dict.fromkeys(setting_of(timed.setup) for timed in found[:_GOOD])
        return self._known[count]

    @property
    def first(self) -> int | None:
        """The smallest number of nodes on which something is known to fit."""
        return min((count for count, timed in self._known.items() if timed is not None), default=None)

    def _fill_first(self) -> None:
        """Find the smallest number of nodes on which something fits, if something does on the most."""
        low, high = 0, len(self.nodes) - 1
        if self._known[self.nodes[high]] is None or self._known[self.nodes[low]] is not None:
            return
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._search(self.nodes[middle]) is not None else (middle, high)

    @property
    def is_empty(self) -> bool:
        """Whether nothing fits."""
        return self.first is None

    @property
    def is_timeless(self) -> bool:
        """Whether no speed is known."""
        return not any(found and found.tokens_per_second for found in self._known.values())

    def offer(self, count: int) -> Offer | None:
        """Return the offer on so many nodes, which fits by the allocator's simulation; None if nothing does."""
        while (found := self._search(count, whole=False)) is not None or (found := self._search(count)) is not None:
            for segments in (False, True):
                offer = Offer(self.goal, found, self.kind.price, segments)
                if offer.prediction.fits:
                    return offer
            self._fastest.refuse(found)
            self._whole.discard(count)
            del self._known[count]
        return None

    def drafts(self) -> list[Offer]:
        """Return an offer for each number of nodes, with interpolated speeds."""
        known = sorted((count, timed) for count, timed in self._known.items() if timed is not None)
        found = []
        for count in self.nodes:
            below = [one for one in known if one[0] <= count]
            above = [one for one in known if one[0] >= count]
            if below and above:
                speed = _between(count, below[-1], above[0])
                timed = Timed(self._fastest.cluster(count), below[-1][1].setup, speed)
                found.append(Offer(self.goal, timed, self.kind.price))
        return found


def _between(count: int, below: tuple[int, Timed], above: tuple[int, Timed]) -> float:
    low, high = below[1].tokens_per_second_per_gpu, above[1].tokens_per_second_per_gpu
    if below[0] == above[0]:
        return low
    return low + (high - low) * log(count / below[0]) / log(above[0] / below[0])


class _Choice:
    """Chooses from drafts until what is chosen is no draft."""

    def __init__(self, goal: Goal, searched: Sequence[_Searched], left: tuple[Left, ...]) -> None:
        self._goal, self._searched, self._left = goal, searched, left
        self._made: dict[tuple[str, int], Offer | None] = {}

    def plan(self) -> Plan:
        """Return the plan."""
        while True:
            drafts = [self._made_or(draft) for each in self._searched for draft in each.drafts()]
            offers = [offer for offer in drafts if offer is not None]
            picked = pick(self._goal, offers)
            if all(offer.key in self._made for offer in picked.all()):
                break
            for offer in picked.all():
                self._make(offer)
        reason = reason_of(self._goal, picked, len(offers))
        return Plan(self._goal, picked, reason, self._left, len(offers))

    def _made_or(self, draft: Offer) -> Offer | None:
        return self._made.get(draft.key, draft)

    def _make(self, draft: Offer) -> None:
        if draft.key not in self._made:
            own = next(each for each in self._searched if each.kind.server is draft.cluster.server)
            self._made[draft.key] = own.offer(draft.cluster.num_nodes)
