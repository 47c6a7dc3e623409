"""Finds in a recorded step the blocks that do the same, and writes them down once.

Blocks run one after another in the forward of one module. An iteration is a block, or several where kinds of blocks
alternate, with what its caller does up to the next one. Iterations do the same if they are equal once every storage and
node is named by how many iterations before it was made, instead of by its number.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.recorded import Variant
from fsdp_bench.spec.recording.steps import (
    Allocation,
    Call,
    Drop,
    GradientRef,
    Instruction,
    Loop,
    LoopRecord,
    MakeNode,
    NodeRecord,
    Operator,
    Save,
    TensorRef,
)
from fsdp_bench.train.recording.backward import RawNode
from fsdp_bench.train.recording.forward import Code

LONGEST_PERIOD = 8
_OF_A_LOOP = re.compile(r"L(\d+)\.(\d+)\.(\d+)")
_FEWEST_ITERATIONS = 2
"""The fewest iterations of a loop, which must be equal."""
_MOST_BEFORE = 4
"""The most blocks at the beginning that may differ from the others, if the period is not longer."""


class Iteration(NamedTuple):
    """One iteration: its instructions, and the storages and nodes that it makes, in order."""

    code: Code
    storages: list[int]
    nodes: list[int]

    @classmethod
    def of(cls, code: Code) -> "Iteration":
        """Return the iteration that does this."""
        every = list(instructions(code))
        storages = [allocation[0] for event in every if event[0] == "o" for allocation in event[5]]
        return cls(code, storages, [event[1] for event in every if event[0] == "n"])


class FoundLoop(NamedTuple):
    """A loop in the code of one call."""

    path: str
    number: int
    first: int
    period: int
    begin: int
    """Index of its first instruction in the call's code; ``end`` is excluded."""
    end: int
    iterations: list[Iteration]
    before: list[Iteration]
    """The iteration before the first one, if it makes as much."""

    def places(self, kind: Literal["storages", "nodes"]) -> dict[int, tuple[int, int, int]]:
        """Return where each storage or node is made: the loop, the iteration (-1 before the first), its place there."""
        return {
            number: (self.number, index, place)
            for index, one in [*enumerate(self.iterations), *((-1, one) for one in self.before)]
            for place, number in enumerate(getattr(one, kind))
        }


def instructions(code: Code) -> Iterator[Code]:
    """Yield instructions and, behind a call, those of the call."""
    for event in code:
        yield event
        if event[0] == "c":
            yield from instructions(event[3])


class Writer:
    """Writes a recorded step as the structs of spec/recording, with loops where blocks do the same."""

    def __init__(
        self,
        top: Code,
        nodes: dict[int, RawNode],
        lists: dict[str, int],
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Find the loops, or those at ``places``: the first block and the period, by list."""
        self._top, self._nodes = top, nodes
        code = chain(instructions([top]), *(chain(node.code, *node.adapts) for node in nodes.values()))
        names = dict.fromkeys(event[1] for event in code if event[0] == "o")
        self._numbers = {name: index for index, name in enumerate(names)}
        self._storage_in: dict[int, tuple[int, int, int]] = {}
        self._node_in: dict[int, tuple[int, int, int]] = {}
        self.loops: list[FoundLoop] = []
        self._loop_at: dict[int, FoundLoop] = {}
        """The loop in the code of a call, by the identity of the call."""
        for path, count in lists.items():
            if places is None:
                periods = range(1, LONGEST_PERIOD + 1)
                self._find(path, count, [(n, first) for n in periods for first in range(max(n, _MOST_BEFORE) + 1)])
            elif path in places:
                first, period = places[path]
                self._find(path, count, [(period, first)])

    # -- finding -------------------------------------------------------------------------------------------------

    def _find(self, path: str, count: int, candidates: Iterable[tuple[int, int]]) -> None:
        """Find the loop of a list of blocks: the first of the candidates, a period and a first block, that is one."""
        for call in (event for event in instructions([self._top]) if event[0] == "c"):
            at = {event[1]: index for index, event in enumerate(call[3]) if event[0] == "c"}
            places = [at.get(f"{path}.{index}", -1) for index in range(count)]
            if -1 not in places and places == sorted(places):
                break
        else:
            return
        for period, first in candidates:
            found = self._loop(path, call[3], places, first, period)
            if found is not None:
                self.loops.append(found)
                self._loop_at[id(call)] = found
                return

    def _loop(self, path: str, code: Code, places: list[int], first: int, period: int) -> FoundLoop | None:
        count = (len(places) - 1 - first) // period
        if count < _FEWEST_ITERATIONS:
            return None
        starts = [places[first + index * period] for index in range(count + 1)]
        iterations = [Iteration.of(code[begin:end]) for begin, end in pairwise(starts)]
        sizes = {(len(one.storages), len(one.nodes)) for one in iterations}
        if len(sizes) > 1:
            return None
        before = []
        if first >= period:
            earlier = Iteration.of(code[places[first - period] : starts[0]])
            if (len(earlier.storages), len(earlier.nodes)) in sizes:
                before = [earlier]
        found = FoundLoop(path, len(self.loops), first, period, starts[0], starts[-1], iterations, before)
        others = self._storage_in, self._node_in
        self._storage_in, self._node_in = others[0] | found.places("storages"), others[1] | found.places("nodes")
        self.loops.append(found)
        written = [self._written(found, index) for index in range(count)]
        self.loops.pop()
        if all(other == written[0] for other in written[1:]):
            return found
        self._storage_in, self._node_in = others
        return None

    # -- writing -------------------------------------------------------------------------------------------------

    def variant(self, loss: Code, buffers: list[Any], formulas: tuple[str, ...]) -> Variant:
        """Return the step; nodes that a loop makes are in the loop."""
        writing = _Writing(self, None, 0)
        top = writing.instruction(self._top)
        assert isinstance(top, Call)
        inside = {n for loop in self.loops for iteration in loop.iterations for n in iteration.nodes}
        return Variant(
            top=top,
            nodes={number: writing.node(node) for number, node in self._nodes.items() if number not in inside},
            loops=tuple(self._written(loop, 0) for loop in self.loops),
            loss=writing.tensor(loss),
            buffers=tuple(size for _, size in buffers),
            buffer_modules=tuple(module for module, _ in buffers),
            names=tuple(self._numbers),
            formulas=formulas,
        )

    def _written(self, loop: FoundLoop, index: int) -> LoopRecord:
        """Return a loop by one of its iterations: of all they are the same."""
        writing, iteration = _Writing(self, loop, index), loop.iterations[index]
        return LoopRecord(
            path=loop.path,
            first=loop.first,
            period=loop.period,
            iterations=len(loop.iterations),
            code=tuple(map(writing.instruction, iteration.code)),
            num_storages=len(iteration.storages),
            nodes=tuple(writing.node(self._nodes[number]) for number in iteration.nodes),
            storages_before=tuple(tuple(one.storages) for one in loop.before),
            nodes_before=tuple(tuple(one.nodes) for one in loop.before),
        )


class _Writing:
    """Writes instructions of one iteration of a loop, or of what is in no loop."""

    def __init__(self, writer: Writer, loop: FoundLoop | None, index: int) -> None:
        self._writer, self._loop, self._index = writer, loop, index

    def instruction(self, event: Code) -> Instruction:
        match event[0]:
            case "o":
                return self._operator(event, lambda number: self._own(number, self._writer._storage_in))
            case "d":
                return Drop(self._storage(event[1]))
            case "n":
                return MakeNode(self._own(event[1], self._writer._node_in))
            case "s":
                return Save(self._node(event[1]), self.tensor(event[2]), event[3])
        _, module, inputs, code, outputs, num_positional = event
        tensors = (tuple(map(self.tensor, inputs)), tuple(map(self.tensor, outputs)))
        return Call(self._name(module), tensors[0], tuple(self._code(event, code)), tensors[1], num_positional)

    def _code(self, call: Code, code: Code) -> Iterator[Instruction]:
        loop = self._writer._loop_at.get(id(call))
        if loop is not None:
            yield from self._of_all_iterations(map(self.instruction, code[: loop.begin]))
            yield Loop(loop.number)
            code = code[loop.end :]
        yield from self._of_all_iterations(map(self.instruction, code))

    def _of_all_iterations(self, code: Iterable[Instruction]) -> Iterator[Instruction]:
        """Write drops of the same storage of every iteration as one: a cache is emptied, a list let go."""
        written = list(code)
        dropped = {each.storage for each in written if isinstance(each, Drop)}
        for each in written:
            found = _OF_A_LOOP.fullmatch(each.storage) if isinstance(each, Drop) else None
            if found is None:
                yield each
                continue
            loop, back, place = found.groups()
            count = len(self._writer.loops[int(loop)].iterations)
            if {f"L{loop}.{index}.{place}" for index in range(1, count + 1)} <= dropped:
                if int(back) == count:
                    yield Drop(f"L{loop}.*.{place}")
            elif int(back) == 1:
                yield each
            else:
                raise SpecError(
                    f"what the {back}. block from the end made is used behind the blocks, which a recording"
                    " cannot express"
                )

    def node(self, raw: RawNode) -> NodeRecord:
        return NodeRecord(
            name=raw.name,
            edges=tuple(map(self._edge, raw.edges)),
            num_outputs=raw.num_outputs,
            code=tuple(map(self._in_node, raw.code)),
            gradients=tuple(None if each is None else GradientRef(*each) for each in raw.gradients),
            adapts=tuple(tuple(map(self._in_node, each)) for each in raw.adapts),
        )

    def _in_node(self, event: Code) -> Instruction:
        return Drop(str(event[1])) if event[0] == "d" else self._operator(event, int)

    def _operator(self, event: Code, number_of: Callable[[int], int]) -> Operator:
        _, name, num_bytes, itemsize, dims, made = event
        makes = tuple(Allocation(number_of(number), *what) for number, *what in made)
        return Operator(self._writer._numbers[name], num_bytes, itemsize, tuple(dims), makes)

    def tensor(self, raw: Code) -> TensorRef:
        storage, numel, itemsize, edge = raw
        return TensorRef(self._storage(storage), numel, itemsize, self._edge(edge))

    def _edge(self, edge: Any) -> str:
        if edge is None:
            return ""
        if edge[0] == "p":
            return f"p:{self._name(edge[1])}"
        return f"{self._node(edge[0])}/{edge[1]}"

    def _storage(self, reference: Any) -> str:
        if isinstance(reference, int):
            return self._reference(reference, self._writer._storage_in)
        kind, what = reference
        return "?" if kind == "?" else f"{kind}:{self._name(what) if kind == 'p' else what}"

    def _node(self, number: int) -> str:
        return self._reference(number, self._writer._node_in)

    def _reference(self, number: int, where: dict[int, tuple[int, int, int]]) -> str:
        found = where.get(number)
        if found is None:
            return str(number)
        loop, index, place = found
        if self._loop is not None and loop == self._loop.number:
            return f".{self._index - index}.{place}" if 0 <= self._index - index <= 1 else str(number)
        if index < 0:
            return str(number)
        return f"L{loop}.{len(self._writer.loops[loop].iterations) - index}.{place}"

    def _own(self, number: int, where: dict[int, tuple[int, int, int]]) -> int:
        """Return the number of something that is made here: its place in the iteration."""
        found = where.get(number)
        in_loop = self._loop is not None and found is not None and found[:2] == (self._loop.number, self._index)
        return found[2] if in_loop and found is not None else number

    def _name(self, name: str) -> str:
        """Return the name of a module or parameter. For a block in or behind a loop it is relative to the loop."""
        for loop in self._writer.loops:
            found = re.fullmatch(rf"({re.escape(loop.path)}\.)(\d+)(\..*)?", name)
            if not found:
                continue
            block, end = int(found[2]), loop.first + loop.period * len(loop.iterations)
            if self._loop is loop:
                return f"{found[1]}<{block - loop.first - self._index * loop.period}>{found[3] or ''}"
            if block >= end:
                return f"{found[1]}<end+{block - end}>{found[3] or ''}"
            if block >= loop.first:
                raise SpecError(f"{name}: is used outside of its block, which a recording cannot express")
        return name
