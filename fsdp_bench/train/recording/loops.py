"""Finds in a recorded step the blocks that do the same, and writes them down once.

Blocks run one after another in the forward of one module. An iteration is a block, or several where kinds of blocks
alternate, with what its caller does up to the next one. Iterations do the same if they are equal once every storage and
node is named by how many iterations before it was made, instead of by its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fsdp_bench.spec.errors import SpecError
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


def made_by(code: Code) -> tuple[list[int], list[int]]:
    """Return the storages and nodes that some instructions make, in order."""
    storages: list[int] = []
    nodes: list[int] = []
    for event in code:
        if event[0] == "o":
            storages += [allocation[0] for allocation in event[5]]
        elif event[0] == "n":
            nodes.append(event[1])
        elif event[0] == "c":
            inner = made_by(event[3])
            storages += inner[0]
            nodes += inner[1]
    return storages, nodes


def _calls(call: Code) -> Iterator[Code]:
    yield call
    for event in call[3]:
        if event[0] == "c":
            yield from _calls(event)


class Writer:
    """Writes a recorded step as the structs of spec/recording, with loops where blocks do the same."""

    def __init__(
        self,
        top: Code,
        nodes: dict[int, Code],
        names: list[str],
        lists: dict[str, int],
        places: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Find the loops, or those at ``places``: the first block and the period, by list."""
        self._top, self._nodes, self._names = top, nodes, names
        self._numbers = {name: index for index, name in enumerate(names)}
        self._storage_in: dict[int, tuple[int, int, int]] = {}
        """The loop that made a storage, the iteration (-1 before the first) and its place there."""
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
        for call in _calls(self._top):
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
        iterations = [self._iteration(code[begin:end]) for begin, end in pairwise(starts)]
        sizes = {(len(one.storages), len(one.nodes)) for one in iterations}
        if len(sizes) > 1:
            return None
        before = []
        if first >= period:
            earlier = self._iteration(code[places[first - period] : starts[0]])
            if (len(earlier.storages), len(earlier.nodes)) in sizes:
                before = [earlier]
        found = FoundLoop(path, len(self.loops), first, period, starts[0], starts[-1], iterations, before)
        self._register(found)
        self.loops.append(found)
        written = [self._written(found, index) for index in range(count)]
        self.loops.pop()
        if all(other == written[0] for other in written[1:]):
            return found
        self._forget(found)
        return None

    def _iteration(self, code: Code) -> Iteration:
        return Iteration(code, *made_by(code))

    def _register(self, loop: FoundLoop) -> None:
        for index, iteration in [*enumerate(loop.iterations), *((-1, one) for one in loop.before)]:
            for kind, where in ((iteration.storages, self._storage_in), (iteration.nodes, self._node_in)):
                where.update({number: (loop.number, index, place) for place, number in enumerate(kind)})

    def _forget(self, loop: FoundLoop) -> None:
        for where in (self._storage_in, self._node_in):
            for number in [number for number, found in where.items() if found[0] == loop.number]:
                del where[number]

    # -- writing -------------------------------------------------------------------------------------------------

    def top(self) -> Call:
        """Return the forward pass."""
        made = _Writing(self, None, 0).instruction(self._top)
        assert isinstance(made, Call)
        return made

    def nodes(self) -> dict[int, NodeRecord]:
        """Return the nodes that no loop makes."""
        inside = {n for loop in self.loops for iteration in loop.iterations for n in iteration.nodes}
        writing = _Writing(self, None, 0)
        return {number: writing.node(node) for number, node in self._nodes.items() if number not in inside}

    def tensor(self, raw: Code) -> TensorRef:
        """Return a tensor outside of all loops."""
        return _Writing(self, None, 0).tensor(raw)

    def loop_records(self) -> tuple[LoopRecord, ...]:
        """Return the loops."""
        return tuple(self._record(loop) for loop in self.loops)

    def _record(self, loop: FoundLoop) -> LoopRecord:
        code, nodes = self._written(loop, 0)
        return LoopRecord(
            path=loop.path,
            first=loop.first,
            period=loop.period,
            iterations=len(loop.iterations),
            code=tuple(code),
            num_storages=len(loop.iterations[0].storages),
            nodes=tuple(nodes),
            storages_before=tuple(tuple(one.storages) for one in loop.before),
            nodes_before=tuple(tuple(one.nodes) for one in loop.before),
        )

    def _written(self, loop: FoundLoop, index: int) -> tuple[list[Instruction], list[NodeRecord]]:
        writing, iteration = _Writing(self, loop, index), loop.iterations[index]
        code = [writing.instruction(event) for event in iteration.code]
        return code, [writing.node(self._nodes[number]) for number in iteration.nodes]


class _Writing:
    """Writes instructions of one iteration of a loop, or of what is in no loop."""

    def __init__(self, writer: Writer, loop: FoundLoop | None, index: int) -> None:
        self._writer, self._loop, self._index = writer, loop, index

    def instruction(self, event: Code) -> Instruction:
        match event[0]:
            case "o":
                _, name, num_bytes, itemsize, dims, made = event
                numbers = [self._own_storage(each[0]) for each in made]
                makes = tuple(Allocation(n, each[1], each[2]) for n, each in zip(numbers, made, strict=True))
                return Operator(self._writer._numbers[name], num_bytes, itemsize, tuple(dims), makes)
            case "d":
                return Drop(self._storage(event[1]))
            case "n":
                return MakeNode(self._own_node(event[1]))
            case "s":
                return Save(self._node(event[1]), self.tensor(event[2]), event[3])
        _, module, inputs, code, outputs, num_positional = event
        tensors = (tuple(map(self.tensor, inputs)), tuple(map(self.tensor, outputs)))
        return Call(self._name(module), tensors[0], tuple(self._code(event, code)), tensors[1], num_positional)

    def _code(self, call: Code, code: Code) -> Iterator[Instruction]:
        loop = self._writer._loop_at.get(id(call))
        if loop is None:
            yield from self._of_all_iterations(map(self.instruction, code))
            return
        yield from self._of_all_iterations(map(self.instruction, code[: loop.begin]))
        yield Loop(loop.number)
        yield from self._of_all_iterations(map(self.instruction, code[loop.end :]))

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

    def node(self, raw: Code) -> NodeRecord:
        name, edges, num_outputs, code, gradients, adapts = raw
        return NodeRecord(
            name=name,
            edges=tuple(map(self._edge, edges)),
            num_outputs=num_outputs,
            code=tuple(map(self._local, code)),
            gradients=tuple(None if each is None else GradientRef(*each) for each in gradients),
            adapts=tuple(tuple(map(self._local, each)) for each in adapts),
        )

    def _local(self, event: Code) -> Instruction:
        if event[0] == "d":
            return Drop(str(event[1]))
        _, name, num_bytes, itemsize, dims, made = event
        return Operator(
            self._writer._numbers[name], num_bytes, itemsize, tuple(dims), tuple(Allocation(*each) for each in made)
        )

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

    def _own_storage(self, number: int) -> int:
        return self._own(number, self._writer._storage_in)

    def _own_node(self, number: int) -> int:
        return self._own(number, self._writer._node_in)

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


def operator_names(top: Code, nodes: Sequence[Code]) -> list[str]:
    """Return the names of all operators, each once."""
    names: dict[str, None] = {}

    def visit(code: Code) -> None:
        for event in code:
            if event[0] == "o":
                names[event[1]] = None
            elif event[0] == "c":
                visit(event[3])

    visit([top])
    for node in nodes:
        visit(node[3])
        for code in node[5]:
            visit(code)
    return list(names)


def renumbered(top: Code, nodes: dict[int, Code], loss: Code, first: int) -> tuple[Code, dict[int, Code], Code]:
    """Number the nodes from 0, in the order in which they were made."""

    def edge(value: Any) -> Any:
        return value if value is None or value[0] == "p" else [value[0] - first, value[1]]

    def tensor(raw: Code) -> Code:
        return [*raw[:3], edge(raw[3])]

    def instruction(event: Code) -> Code:
        match event[0]:
            case "n":
                return ["n", event[1] - first]
            case "s":
                return ["s", event[1] - first, tensor(event[2]), event[3]]
            case "c":
                _, module, inputs, code, outputs, num_positional = event
                return [
                    "c",
                    module,
                    list(map(tensor, inputs)),
                    list(map(instruction, code)),
                    list(map(tensor, outputs)),
                    num_positional,
                ]
        return event

    edges = {number - first: [raw[0], list(map(edge, raw[1])), *raw[2:]] for number, raw in nodes.items()}
    return instruction(top), edges, tensor(loss)
