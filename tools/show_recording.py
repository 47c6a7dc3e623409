"""Print a recording as a person reads it: what each module's forward allocates, saves for backward and frees.

python -m tools.show_recording FILE [VARIANT]
python -m tools.show_recording Llama-3.1-8B "bf16 autocast"
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

from fsdp_bench.catalog.lookup import model
from fsdp_bench.catalog.recorded import read_recorded
from fsdp_bench.cli.common.interrupts import forgiving_streams
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.recorded import RecordedCode, Variant
from fsdp_bench.spec.recording.steps import (
    Call,
    Drop,
    HeadWithLoss,
    Instruction,
    Loop,
    MakeNode,
    NodeRecord,
    Operator,
    Save,
    TensorRef,
)


def written_out(variant: Variant) -> Iterator[str]:
    """Yield the lines of a variant: the forward pass, and what each node does in backward below where it is made."""
    for loop in variant.loops:
        blocks = "block" if loop.period == 1 else f"{loop.period} blocks"
        yield f"loop {loop.path}: each iteration, {blocks}"
        yield from _Writer(variant, dict(enumerate(loop.nodes)), ".0.").lines(loop.code, 1)
    yield from _Writer(variant, variant.nodes, "").call(variant.top, 0)


class _Writer:
    """Formulas, names of operators, and the nodes that numbers in the code refer to."""

    def __init__(self, variant: Variant, nodes: Mapping[int, NodeRecord], this_iteration: str) -> None:
        self._formulas, self._names, self._nodes = variant.formulas, variant.names, nodes
        self._this_iteration = this_iteration

    def lines(self, code: tuple[Instruction, ...], depth: int) -> Iterator[str]:
        """Yield the lines of instructions, without operators that allocate nothing and make views."""
        for one in code:
            match one:
                case Call():
                    yield from self.call(one, depth)
                case Operator() if one.makes:
                    yield f"{'  ' * depth}{self._operator(one)}"
                case Save():
                    yield f"{'  ' * depth}node {one.node} saves {self._tensor(one.tensor)}"
                case MakeNode() if self._does_something(node := self._nodes[one.number]):
                    yield f"{'  ' * depth}node {self._this_iteration}{one.number}: {node.name}, in backward:"
                    yield from self.lines(node.code, depth + 2)
                case Drop():
                    yield f"{'  ' * depth}Python drops {one.storage}"
                case Loop():
                    yield f"{'  ' * depth}loop {one.number}"
                case MakeNode() | Operator() | HeadWithLoss():
                    pass

    def call(self, call: Call, depth: int) -> Iterator[str]:
        yield f"{'  ' * depth}{call.module or 'the model'}({', '.join(map(self._tensor, call.inputs))})"
        yield from self.lines(call.code, depth + 1)

    @staticmethod
    def _does_something(node: NodeRecord) -> bool:
        return any(isinstance(one, Operator) and one.makes for one in node.code)

    def _operator(self, one: Operator) -> str:
        made = ", ".join(f"{each.number}: {self._formulas[each.num_bytes]} bytes" for each in one.makes)
        dims = f" of {' x '.join(self._formulas[dim] for dim in one.dims)}" if one.dims else ""
        return f"{self._names[one.name]}{dims} makes {made}"

    def _tensor(self, tensor: TensorRef) -> str:
        return f"{tensor.storage} ({self._formulas[tensor.numel]} x {tensor.itemsize} bytes)"


def _code_of(word: str) -> RecordedCode:
    if Path(word).is_file():
        return read_recorded(Path(word))
    found = model(word, code="huggingface")
    assert isinstance(found, RecordedModel)
    return found.code


def part_of(name: str, variant: str, module: str) -> str:
    """Return the lines of one module's call, as text."""
    lines = list(written_out(_code_of(name).read(variant)))
    first = next(index for index, line in enumerate(lines) if line.lstrip().startswith(f"{module}("))
    depth = len(lines[first]) - len(lines[first].lstrip())
    inside = takewhile(lambda line: line.startswith(" " * (depth + 1)), lines[first + 1 :])
    return "\n".join(line[depth:] for line in (lines[first], *inside))


if __name__ == "__main__":
    code = _code_of(sys.argv[1])
    names = sys.argv[2:] or [next(iter(code.variants))]
    with forgiving_streams(BrokenPipeError):  # ... | head
        print(*written_out(code.read(names[0])), sep="\n")
