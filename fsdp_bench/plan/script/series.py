"""One choice of a script's values on servers of one kind: few numbers of nodes are rehearsed, the others estimated.

Estimates decide what to rehearse, and are never shown. Three rules say what they can be at best, so that no offer is
missed. Between two rehearsed numbers of nodes, what a GPU computes is a constant and a part for its shards; it waits
for the rest no less than on fewer nodes; and all GPUs together are no faster than on more nodes, unless those are
slower than the fewer. What does not fit so many nodes does not fit fewer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log

from fsdp_bench.plan.purchase.goal import Terms
from fsdp_bench.plan.purchase.searched import ServerType
from fsdp_bench.plan.script.cells import Cell, Found, ScriptOffer, Speed
from fsdp_bench.spec.units import format_count

MARKS = (2, 8)
"""Numbers of nodes that are rehearsed, beside the fewest and the most."""


class Series:
    """One choice of values on servers of one kind, over the numbers of nodes."""

    def __init__(
        self,
        terms: Terms,
        kind: ServerType,
        choice: tuple[int, Mapping[str, str]],
        nodes: Sequence[int],
        found: Mapping[Cell, Found],
    ) -> None:
        """``choice``: its place, and its values. ``nodes`` are sorted. ``found`` grows with each rehearsal."""
        self.terms, self.kind, self.nodes = terms, kind, nodes
        self._choice, self.values = choice
        self._found = found

    def cell(self, count: int) -> Cell:
        """Return the cell of so many nodes."""
        return Cell(self.kind.server.name, count, self._choice)

    def known(self) -> dict[int, Found]:
        """Return what is known, by the number of nodes, fewer first."""
        return {count: self._found[cell] for count in self.nodes if (cell := self.cell(count)) in self._found}

    def wanted(self) -> list[int]:
        """Return the numbers of nodes to rehearse next; none if the rest can be estimated.

        First the most. What fails there, or has no time, may do with half as many, and so on down to the fewest.
        """
        known, fewest, most = self.known(), self.nodes[0], self.nodes[-1]
        if most not in known:
            return [most]
        if any(found.trains for found in known.values()):
            marks = sorted({fewest, most, *set(MARKS).intersection(self.nodes)} - known.keys())
            return [count for count in marks if not self._cannot_fit(count, known)]
        first, *others = known.values()
        half = [count for count in self.nodes if 2 * count <= min(known)]
        if first.fits is False or not half or any(other.reason == first.reason for other in others):
            return [fewest] if fewest not in known else []
        return half[-1:]

    def _cannot_fit(self, count: int, known: Mapping[int, Found]) -> bool:
        """Whether more nodes are known not to be enough. Fewer may fit where NCCL needs more memory across nodes."""
        is_too_few = any(more >= count and found.fits is False for more, found in known.items())
        return is_too_few and not any(fewer < count and found.trains for fewer, found in known.items())

    def offers(self, at_best: bool) -> Iterator[ScriptOffer]:
        """Yield an offer for each number of nodes on which it may train: as rehearsed, else estimated.

        ``at_best``: whether an estimate is what the speed does not exceed, instead of what is likely. It is that, too,
        as long as more rehearsals are wanted.
        """
        known = self.known()
        trains = {count: found.speed for count, found in known.items() if found.trains and found.speed is not None}
        is_likely = not at_best and not self.wanted()
        for count in self.nodes:
            if count not in trains and (count in known or self._cannot_fit(count, known)):
                continue
            below = max((one for one in trains if one < count), default=None)
            above = min((one for one in trains if one > count), default=None)
            speed = trains.get(count) or _estimated(count, below, above, trains, is_likely)
            if speed is None or not self._makes_batch(count, trains):
                continue
            if count not in trains and below is None and is_likely and not self._likely_fits(count, known):
                continue
            yield ScriptOffer(
                goal=self.terms,
                price=self.kind.price,
                cell=self.cell(count),
                values=self.values,
                kind=self.kind,
                speed=speed,
                found=known.get(count),
            )

    def _likely_fits(self, count: int, known: Mapping[int, Found]) -> bool:
        """Whether it fits if reserved memory is a constant and a part that is sharded over all nodes."""
        two = [(one, found.memory) for one, found in known.items() if found.trains and found.memory is not None][:2]
        if len(two) < 2:
            return False
        (fewer, large), (more, small) = two
        sharded = (large.peak_reserved_bytes - small.peak_reserved_bytes) / (1 / fewer - 1 / more)
        return sharded * (1 / count - 1 / fewer) <= (large.headroom_bytes or 0)

    def _makes_batch(self, count: int, trains: Mapping[int, Speed]) -> bool:
        """Whether a step may have the global batch: every node has as many tokens, unless rehearsals show otherwise."""
        batch = self.terms.global_batch_tokens
        if batch is None:
            return True
        if count in trains:
            return trains[count].tokens_per_step == batch
        of_a_node = {round(one.tokens_per_step / nodes) for nodes, one in trains.items()}
        return len(trains) == 1 or len(of_a_node) > 1 or of_a_node.pop() * count == batch

    def to_rehearse(self, offer: ScriptOffer, shown: set[Cell] | None) -> Cell:
        """Return the cell to rehearse for an offer that is picked.

        It is the offer's own; where that is only possible at best, the next to what is ``shown``, else the one in the
        middle of what is not known.
        """
        known, count = self.known(), offer.cell.num_nodes
        if shown is None or count in known:
            return offer.cell
        low = max((one for one in known if one < count), default=0)
        high = min((one for one in known if one > count), default=self.nodes[-1] + 1)
        between = [self.cell(one) for one in self.nodes if low < one < high]
        if self.cell(high) in shown:
            return between[-1]
        return between[0] if self.cell(low) in shown else between[len(between) // 2]

    def reasons(self) -> dict[str, list[int]]:
        """Return why it is not known whether or how fast it trains, or why it has no offer, each with the nodes."""
        known, found = self.known(), dict[str, list[int]]()
        for count, one in known.items():
            if one.reason is not None:
                found.setdefault(one.reason, []).append(count)
        if found or not known or any(True for _ in self.offers(at_best=False)):
            return found
        speeds = [(count, one.speed) for count, one in known.items() if one.trains and one.speed is not None]
        if not speeds:
            return {"it does not fit, or only with allocation retries": list(known)}
        made = ", ".join(f"{count} of them make {format_count(one.tokens_per_step)}" for count, one in speeds)
        return {f"no number of nodes makes the global batch: {made}": list(known)}


def _estimated(
    count: int, below: int | None, above: int | None, trains: Mapping[int, Speed], is_likely: bool
) -> Speed | None:
    """Return what the speed is likely to be, or does not exceed, between the nearest that are known."""
    fewer, more = trains.get(below or 0), trains.get(above or 0)
    like = more or fewer
    if like is None or (more is None and is_likely):
        return None
    if fewer is None or below is None:
        each = like.tokens_per_second_per_gpu if is_likely else like.without_collectives
    elif more is None or above is None:
        each = fewer.tokens_per_second_per_gpu
    else:
        sharded, part = (1 / below - 1 / count) / (1 / below - 1 / above), log(count / below) / log(above / below)
        computes = _between(1 / fewer.without_collectives, 1 / more.without_collectives, sharded)
        waits = _between(fewer.waits, more.waits, part) if is_likely else min(fewer.waits, more.waits)
        each = 1 / (computes + waits)
        together = above * more.tokens_per_second_per_gpu
        if not is_likely and together >= below * fewer.tokens_per_second_per_gpu:
            each = min(each, together / count)
    return replace(like, tokens_per_second_per_gpu=each)


def _between(low: float, high: float, part: float) -> float:
    return low + part * (high - low)
