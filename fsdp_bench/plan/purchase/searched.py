"""The offers of one kind of server: at first by a bound on its speed, once they matter by search.

The fastest setting is searched on few numbers of nodes, and where it changes between two of them. Elsewhere the speed
of one GPU is interpolated, to choose which offers to look at. Those are searched on their own number of nodes, and
their memory is simulated with PyTorch's caching allocator; what does not fit is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import NamedTuple

from fsdp_bench.plan.purchase.fastest import Fastest, Reached, Timed
from fsdp_bench.plan.purchase.goal import Setting, setting_of
from fsdp_bench.plan.purchase.offer import Offer
from fsdp_bench.plan.purchase.simulated import LiveKey, Simulated
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.price import Price
from fsdp_bench.spec.setup import TrainSetup

_GOOD = 4
"""So many of the fastest settings on the fewest and on the most nodes are timed between them."""


@dataclass(frozen=True)
class ServerType:
    """One kind of server."""

    server: Server
    gpu: Gpu
    price: Price | None
    gpus_per_node: int


class Learned(NamedTuple):
    """What was simulated for one kind of server."""

    live: dict[LiveKey, dict[int, int]]
    """Live bytes by the number of ranks."""
    computation: dict[tuple[str, Setting, int], float]
    reached: dict[TrainSetup, Reached]
    refused: set[tuple[Setting, int, int]]


class Found(NamedTuple):
    """The result of a search of one kind of server."""

    known: dict[int, Timed | None]
    good: dict[Setting, None]
    learned: Learned


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
        """Look for numbers of nodes on which something may fit.

        Args:
            simulated: what was simulated for the goal.
            kind: the kind of server.
            nodes: the numbers of nodes to choose from.
            times: a setting fits if it does even with a peak so many times as high.
            among: the settings to choose from; by default all.
        """
        self.goal, self.kind, self._simulated = simulated.goal, kind, simulated
        self._times, self._among, self._asked = times, among, nodes
        self._fastest = Fastest(simulated, kind.server, kind.gpu, kind.gpus_per_node, times)
        self.nodes = self._that_fit(nodes)
        """The numbers of nodes on which the live bytes of some setting fit."""
        self.bound = self._fastest.bound(self.nodes[0], self.nodes[-1]) if self.nodes else 0.0
        """Tokens per second that one GPU does not exceed. 0 if its rates are not known."""
        self.is_searched = False
        self._progress: Callable[[str], None] = lambda what: None
        self._known: dict[int, Timed | None] = {}
        """The fastest on the numbers of nodes that were searched, by live bytes."""
        self._good: dict[Setting, None] = {}
        """The settings that were among the fastest."""

    def _that_fit(self, nodes: Sequence[int]) -> list[int]:
        """Return the numbers of nodes on which something may fit. A setting that fits some nodes fits more.

        But for one GPU, which has no FSDP's or DDP's buffers.
        """
        possible = [count for count in nodes if self._fastest.example(count) is not None]
        self.makes_batch = bool(possible)
        """Whether some number of nodes makes the global batch."""
        num_alone = int(bool(possible) and possible[0] * self.kind.gpus_per_node == 1)
        alone, others = possible[:num_alone], possible[num_alone:]
        first = bisect_left(others, True, key=self._fastest.anything_fits)
        return [*filter(self._fastest.anything_fits, alone), *others[first:]]

    @property
    def unknown(self) -> str:
        """Why the speed is unknown, as text."""
        return self._fastest.unknown(self.nodes[0])

    def search(self, progress: Callable[[str], None] = lambda what: None) -> Found:
        """Look for the fastest settings on the fewest and on the most nodes, and between them among these.

        ``progress`` is called with each number of nodes. Return what was found, to be sent between processes.
        """
        self._progress = progress
        for count in dict.fromkeys((self.nodes[-1], self.nodes[0])):
            self._search(count)
        for count in sorted({4, 16, 64, 256}.intersection(self.nodes[1:-1])):
            self._search(count, whole=False)
        known = [index for index, count in enumerate(self.nodes) if count in self._known]
        for fewer, more in pairwise(known):
            self._search_between(fewer, more)
        return Found(self._known, self._good, self.learned())

    def take(self, found: Found) -> None:
        """Take over what another process has found."""
        self.is_searched = True
        self._known, self._good, learned = found
        self.learn(learned)

    def learned(self) -> Learned:
        """Return what was simulated, to be sent between processes."""
        return Learned(
            self._simulated.live(), self._simulated.computation, self._fastest.reached, self._fastest.refused
        )

    def learn(self, learned: Learned) -> None:
        """Take over what another process has simulated."""
        self._simulated.learn(learned.live, learned.computation)
        self._fastest.learn(learned.reached, learned.refused)

    def _search_between(self, fewer: int, more: int) -> None:
        """Search, between two positions in ``nodes``, where the setting of the second begins to fit.

        There the speed of one GPU jumps, and falls from there on with the time of collectives, so that an offer on so
        many nodes may be cheaper than on the fewest and on the most.
        """
        while more - fewer > 1 and self._fastest_at(fewer) != self._fastest_at(more):
            middle = (fewer + more) // 2
            self._search(self.nodes[middle], whole=False)
            if self._fastest_at(middle) == self._fastest_at(more):
                more = middle
            else:
                fewer = middle

    def _fastest_at(self, position: int) -> tuple[Setting, int] | None:
        timed = self._known[self.nodes[position]]
        return (setting_of(timed.setup), timed.setup.micro_batch_size) if timed is not None else None

    def _search(self, count: int, whole: bool = True) -> None:
        if count in self._known:
            return
        self._progress(f"{count} x {self.kind.server.name}")
        if not whole:
            self._known[count] = self._if_known(self._fastest.best(count, list(self._good)))
            return
        found = [one for one in self._fastest.on(count, self._among) if one.tokens_per_second]
        self._known[count] = found[0] if found else None
        self._good |= dict.fromkeys(setting_of(timed.setup) for timed in found[:_GOOD])

    @staticmethod
    def _if_known(timed: Timed | None) -> Timed | None:
        return timed if timed is not None and timed.tokens_per_second else None

    @property
    def has_offers(self) -> bool:
        """Whether something fits that has a speed, as far as is known."""
        return not self.is_searched or any(self._known.values())

    def offer(self, count: int) -> Offer | None:
        """Return the offer on so many nodes, which fits by the allocator's simulation; None if nothing does."""
        while found := self._if_known(self._fastest.best(count, self._among)):
            for segments in (False, True):
                offer = Offer(self.goal, found, self.kind.price, segments)
                if offer.fits_if_higher(self._times):
                    return offer
            self._fastest.refuse(found)
        return None

    def sparing(self, times: float, among: Sequence[Setting]) -> Searched:
        """Return offers among some settings that fit even with a peak so many times as high."""
        found = Searched(self._simulated, self.kind, self._asked, times, among)
        found._fastest.learn(self._fastest.reached, self._fastest.refused)
        return found

    def drafts(self) -> Iterator[Offer]:
        """Yield an offer for each number of nodes, with the bound as its speed, or with an interpolated one."""
        known = sorted((count, timed) for count, timed in self._known.items() if timed is not None)
        for count in self.nodes:
            speed = self._between(count, known) if self.is_searched else self.bound
            setup = self._fastest.example(count)
            if speed is not None and setup is not None:
                yield Offer(self.goal, Timed(self._fastest.cluster(count), setup, speed), self.kind.price)

    @staticmethod
    def _between(count: int, known: Sequence[tuple[int, Timed]]) -> float | None:
        below = [one for one in known if one[0] <= count]
        above = [one for one in known if one[0] >= count]
        if not below or not above:
            return None
        (fewer, slow), (more, fast) = below[-1], above[0]
        low, high = slow.tokens_per_second_per_gpu, fast.tokens_per_second_per_gpu
        return low if fewer == more else low + (high - low) * log(count / fewer) / log(more / fewer)
