"""The offers of one kind of server: at first by a bound on its speed, once they matter by search.

The fastest setting is searched on few numbers of nodes, and where it changes between two of them: its memory is
simulated with PyTorch's caching allocator, and what does not fit is refused. Elsewhere the speed of one GPU is
interpolated, to choose which offers to look at. Those are searched in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log

from fsdp_bench.plan.purchase.fastest import Fastest, Reached, Timed
from fsdp_bench.plan.purchase.goal import Setting, setting_of
from fsdp_bench.plan.purchase.offer import SettingOffer, replayed
from fsdp_bench.plan.purchase.simulated import Learned, Simulated
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.price import Price
from fsdp_bench.spec.setup import TrainSetup

_MARKS = (4, 16, 64, 256)
"""Numbers of nodes that are searched, beside the fewest and the most."""


@dataclass(frozen=True)
class ServerType:
    """One kind of server."""

    server: Server
    gpu: Gpu
    price: Price | None
    gpus_per_node: int


class Searched:
    """The offers of one kind of server."""

    def __init__(
        self,
        simulated: Simulated,
        kind: ServerType,
        nodes: Sequence[int],
        times: float = 1.0,
        among: Sequence[Setting] | None = None,
    ) -> None:
        """Look for numbers of nodes on which one of ``among``, by default of all, may fit at ``times`` its peak."""
        self.goal, self.kind, self.simulated = simulated.goal, kind, simulated
        self._times, self._among, self._asked = times, among, nodes
        self.fastest = Fastest(simulated, kind.server, kind.gpu, kind.gpus_per_node, times)
        self.nodes = self._that_fit(nodes)
        """The numbers of nodes on which the live bytes of some setting fit."""
        self.bound = self.fastest.bound(self.nodes[0], self.nodes[-1]) if self.nodes else 0.0
        """Tokens per second that one GPU does not exceed. 0 if its rates are not known."""
        self._made: dict[int, SettingOffer | None] = {}
        """The offers on the numbers of nodes that were searched. None where nothing fits, or its speed is not known."""
        self._offers: list[SettingOffer] = []

    def _that_fit(self, nodes: Sequence[int]) -> list[int]:
        """Return the numbers of nodes on which something may fit: all above one that does, but for a lone GPU."""
        possible = [count for count in nodes if self.fastest.example(count) is not None]
        self.makes_batch = bool(possible)
        """Whether some number of nodes makes the global batch."""
        num_alone = int(bool(possible) and possible[0] * self.kind.gpus_per_node == 1)
        alone, others = possible[:num_alone], possible[num_alone:]
        first = bisect_left(others, True, key=self.fastest.anything_fits)
        return [*filter(self.fastest.anything_fits, alone), *others[first:]]

    @property
    def unknown(self) -> str:
        """Why the speed is unknown, as text."""
        return self.fastest.unknown(self.nodes[0])

    def wanted(self) -> list[int]:
        """Return the numbers of nodes to search next; none if the search has ended.

        First the most nodes, then the fewest and some between. Where the setting changes from one of these to the next,
        bisection finds where that of the second begins to fit: there the speed of one GPU jumps, and falls from there
        on with the time of collectives, so that an offer on so many nodes may be cheaper than those on both.
        """
        fewest, most = self.nodes[0], self.nodes[-1]
        if most not in self._made:
            return [most]
        marks = sorted({fewest, most, *set(_MARKS).intersection(self.nodes)})
        if missing := [count for count in marks if count not in self._made]:
            return missing
        return [found for fewer, more in pairwise(marks) if (found := self._between(fewer, more)) is not None]

    def _between(self, fewer: int, more: int) -> int | None:
        """Return the number of nodes to search next between two; None if the setting changes nowhere."""
        low, high = self.nodes.index(fewer), self.nodes.index(more)
        while high - low > 1 and self._setting_on(low) != self._setting_on(high):
            middle = (low + high) // 2
            if self.nodes[middle] not in self._made:
                return self.nodes[middle]
            low, high = (low, middle) if self._setting_on(middle) == self._setting_on(high) else (middle, high)
        return None

    def _setting_on(self, position: int) -> tuple[Setting, int] | None:
        made = self._made[self.nodes[position]]
        return (setting_of(made.timed.setup), made.timed.setup.micro_batch_size) if made is not None else None

    def has_made(self, count: int) -> bool:
        """Return whether so many nodes were searched."""
        return count in self._made

    def take(
        self,
        count: int,
        offer: SettingOffer | None,
        learned: Learned,
        reached: dict[TrainSetup, Reached],
        refused: set[tuple[Setting, int, int]],
    ) -> None:
        """Take over the offer on so many nodes, made in another process, and what was found out for it."""
        self._made[count], self._offers = offer, []
        self.simulated.learn(learned)
        self.fastest.learn(reached, refused)

    @property
    def lacks_speed(self) -> bool:
        """Whether the speed of something that may fit is not known."""
        return not self.bound or any(not one.tokens_per_second_per_gpu for one in self.fastest.reached.values())

    @property
    def has_offers(self) -> bool:
        """Whether something fits that has a speed, as far as is known."""
        return any(self._made.values()) or bool(self.wanted())

    def offer(self, count: int) -> SettingOffer | None:
        """Return the offer on so many nodes, which fits by the allocator's simulation; None if nothing does."""
        while (found := self.fastest.best(count, self._among)) is not None and found.tokens_per_second:
            offer = SettingOffer(
                goal=self.goal, timed=found, price=self.kind.price, steps=self.fastest.steps(replayed(found.setup))
            )
            for one in (offer, replace(offer, expandable_segments=True)):
                if one.fits_if_higher(self._times):
                    return one
            self.fastest.refuse(found)
        return None

    def sparing(self, times: float, among: Sequence[Setting]) -> Searched:
        """Return offers among some settings that fit even with a peak so many times as high."""
        found = Searched(self.simulated, self.kind, self._asked, times, among)
        found.fastest.learn(self.fastest.reached, self.fastest.refused)
        return found

    def offers(self) -> list[SettingOffer]:
        """Return an offer for each number of nodes, not searched ones with the bound, later an interpolated speed."""
        self._offers = self._offers or [*self._each_offer()]
        return self._offers

    def _each_offer(self) -> Iterator[SettingOffer]:
        made = sorted((count, offer.timed) for count, offer in self._made.items() if offer is not None)
        has_ended = not self.wanted()
        for count in self.nodes:
            if count in self._made:
                if (offer := self._made[count]) is not None:
                    yield offer
                continue
            speed = _interpolated(count, made) if has_ended else self.bound
            setup = self.fastest.example(count)
            if speed is not None and setup is not None:
                timed = Timed(self.fastest.cluster(count), setup, speed)
                yield SettingOffer(goal=self.goal, timed=timed, price=self.kind.price)


def _interpolated(count: int, known: Sequence[tuple[int, Timed]]) -> float | None:
    """Return tokens per second of one GPU on so many nodes, between those of fewer and of more; None beside them."""
    below = [one for one in known if one[0] < count]
    above = [one for one in known if one[0] > count]
    if not below or not above:
        return None
    (fewer, slow), (more, fast) = below[-1], above[0]
    low, high = slow.tokens_per_second_per_gpu, fast.tokens_per_second_per_gpu
    return low + (high - low) * log(count / fewer) / log(more / fewer)
