"""The storage or node of the running step that a reference of the recording means (spec/recording/steps.py)."""

import re

from fsdp_bench.spec.recording.steps import LoopRecord

_BY_LOOP = 1 << 32
"""Numbers in loops begin at a multiple of this, so that they are nobody else's."""

_RELATIVE = re.compile(r"(?:L(\d+))?\.(\d+)\.(\d+)")
_BLOCK = re.compile(r"<(end\+)?(-?\d+)>")


class Unrolled:
    """One loop with the iterations of a model of some depth."""

    def __init__(self, record: LoopRecord, number: int, iterations: int) -> None:
        self.record, self.number, self.iterations = record, number, iterations
        self._first = (number + 1) * _BY_LOOP

    def key(self, iteration: int, place: int, is_node: bool) -> int:
        """Return the number of what an iteration makes; -1 is the one before the loop, whose numbers are others."""
        record = self.record
        if iteration >= 0:
            return self._first + iteration * (len(record.nodes) if is_node else record.num_storages) + place
        before = record.nodes_before if is_node else record.storages_before
        return before[-iteration - 1][place]


class Scope:
    """Where an instruction is: in one iteration of a loop, or in none."""

    def __init__(self, loops: list[Unrolled], loop: Unrolled | None = None, iteration: int = 0) -> None:
        self._loops, self.loop, self._iteration = loops, loop, iteration

    def inside(self, loop: Unrolled, iteration: int) -> "Scope":
        """Return the scope of an iteration."""
        return Scope(self._loops, loop, iteration)

    def own(self, number: int, is_node: bool = False) -> int:
        """Return the number of what an instruction makes."""
        return number if self.loop is None else self.loop.key(self._iteration, number, is_node)

    def refer(self, reference: str, is_node: bool = False) -> int | str:
        """Return the number that a reference means, or the reference itself: ``p:``, ``b:``, ``i:``, ``?``."""
        if reference.isdecimal():
            return int(reference)
        found = _RELATIVE.fullmatch(reference)
        if found is None:
            return self.name(reference)
        back, place = int(found[2]), int(found[3])
        if found[1] is not None:
            loop = self._loops[int(found[1])]
            return loop.key(loop.iterations - back, place, is_node)
        assert self.loop is not None
        return self.loop.key(self._iteration - back, place, is_node)

    def all_of(self, reference: str) -> tuple[Unrolled, list[int]]:
        """Return the loop of a reference like ``L0.*.5``, and the number of that storage in each iteration."""
        loop, _, place = reference[1:].split(".")
        unrolled = self._loops[int(loop)]
        numbers = [unrolled.key(iteration, int(place), is_node=False) for iteration in range(unrolled.iterations)]
        return unrolled, numbers

    def name(self, name: str) -> str:
        """Return the name of a module or parameter with the numbers of its blocks."""
        if "<" not in name:
            return name

        def number(found: re.Match[str]) -> str:
            loop = self.loop
            if found[1] is not None or loop is None:
                loop = next(one for one in self._loops if f"{one.record.path}.<" in name)
                return str(loop.record.first + loop.iterations * loop.record.period + int(found[2]))
            return str(loop.record.first + self._iteration * loop.record.period + int(found[2]))

        return _BLOCK.sub(number, name)


class StandIn(Scope):
    """A block before the loop that runs the code of the loop's blocks: its inputs and outputs are its own."""

    def __init__(
        self, loops: list[Unrolled], loop: Unrolled, iteration: int, places: dict[bool, dict[str, int | str]]
    ) -> None:
        """Keep by whether it is a node what stands for references of the loop's code to inputs and outputs."""
        super().__init__(loops, loop, iteration)
        self._places = places

    def own(self, number: int, is_node: bool = False) -> int:
        """Return the number of what an instruction makes: one that no iteration has, unless it is an output."""
        assert self.loop is not None
        found = self._places[is_node].get(f".0.{number}")
        fresh = self.loop.key(self.loop.iterations - self._iteration, number, is_node)
        return found if isinstance(found, int) else fresh

    def refer(self, reference: str, is_node: bool = False) -> int | str:
        """Return the number that a reference means, or the reference itself."""
        if (found := self._places[is_node].get(reference)) is not None:
            return found
        relative = _RELATIVE.fullmatch(reference)
        if relative is None or relative[1] is not None:
            return super().refer(reference, is_node)
        assert relative[2] == "0", "a block refers to nothing of the one before but its inputs"
        return self.own(int(relative[3]), is_node)
