"""Records backward node by node, in the order of torch's engine.

Each node runs alone, on gradients of the layout that they really have, so what it allocates for itself, which of its
inputs it hands on, and what torch adds to give a gradient its input's shape and dtype (validate_outputs in engine.cpp)
is known for each node.
"""

import heapq
from itertools import chain
from typing import Any

import msgspec
import torch

from fsdp_bench.train.recording.formulas import Size
from fsdp_bench.train.recording.forward import Code, Names, Recorder


def is_accumulator(node: Any) -> bool:
    """Whether a node is where a parameter's gradient ends."""
    return type(node).__name__ == "AccumulateGrad"


class RawNode(msgspec.Struct):
    """The actions of one node: a NodeRecord (spec/recording/steps.py) whose code is lists."""

    name: str
    edges: list[Any]
    num_outputs: int
    code: Code = []
    gradients: list[Any] = []
    adapts: list[Code] = []


def record_backward(recorder: Recorder, loss: torch.Tensor, names: Names) -> tuple[dict[int, RawNode], list[str]]:
    """Run backward; return the nodes of the graph by sequence number, and what is not known."""
    root: Any = loss.grad_fn
    found, waiting = _graph(recorder, root, names)
    notes: list[str] = []
    buffers: dict[Any, list[Any]] = {root: [torch.ones_like(loss)]}
    ready = [(-root._sequence_nr(), 0, root)]
    num_pushed = 0
    with recorder, torch.no_grad():
        while ready:
            node = heapq.heappop(ready)[2]
            given = buffers.pop(node, [None] * len(node._input_metadata))
            gradients = _run(recorder, found[recorder.number_of(node)], node, given, notes)
            del given
            for (target, slot), gradient in zip(node.next_functions, gradients, strict=True):
                if target is None or is_accumulator(target):
                    continue
                if gradient is not None:
                    buffer = buffers.setdefault(target, [None] * len(target._input_metadata))
                    buffer[slot] = gradient if buffer[slot] is None else buffer[slot] + gradient
                waiting[target] -= 1
                if not waiting[target]:
                    num_pushed += 1
                    heapq.heappush(ready, (-target._sequence_nr(), num_pushed, target))
            del gradients, gradient
    return found, notes


def _graph(recorder: Recorder, root: Any, names: Names) -> tuple[dict[int, RawNode], dict[Any, int]]:
    """Return the nodes below a root, and for how many gradients each of them waits."""

    def edge(node: Any, output: int) -> Any:
        if node is None:
            return None
        if not is_accumulator(node):
            return [recorder.number_of(node), output]
        if node.variable not in names:
            raise RuntimeError("the code reads an adapter without running it, and FSDP has it sharded then")
        return ["p", names[node.variable]]

    waiting: dict[Any, int] = {root: 0}
    stack, found = [root], {}
    while stack:
        node = stack.pop()
        edges = [edge(target, output) for target, output in node.next_functions]
        found[recorder.number_of(node)] = RawNode(type(node).__name__, edges, len(node._input_metadata))
        for target, _ in node.next_functions:
            if target is not None and not is_accumulator(target):
                if target not in waiting:
                    stack.append(target)
                waiting[target] = waiting.get(target, 0) + 1
    return found, waiting


def _run(recorder: Recorder, made: RawNode, node: Any, given: list[Any], notes: list[str]) -> list[Any]:
    """Run one node; note what it does; return its gradients."""
    keys = {g.untyped_storage()._cdata: slot for slot, g in enumerate(given) if g is not None}
    for key, slot in keys.items():
        recorder.known[key] = ["g", slot]
    recorder.substitutes, recorder.unpacked, recorder.log = [], [], []
    first = recorder.next_storage
    recorder.on = True
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    result = node.apply(*given) if is_python else node(*given)
    recorder.on = False
    recorder.opened_by.update(dict.fromkeys(recorder.unpacked, recorder.number_of(node)))
    gradients = list(result) if isinstance(result, tuple) else [result]
    del result
    made.code, recorder.log = _local(recorder.log, first), []
    gradients += [None] * (len(node.next_functions) - len(gradients))
    gradients = gradients[: len(node.next_functions)]
    for index, (target, slot) in enumerate(node.next_functions):
        gradients[index], code = _adapted(recorder, gradients[index], target, slot)
        made.adapts.append(_local(code, first))
    for index, gradient in enumerate(gradients):
        made.gradients.append(_described(recorder, gradient, first, f"{made.name}, gradient {index}", notes))
        target = node.next_functions[index][0]
        if gradient is not None and target is not None and is_accumulator(target):
            _mark_gradient(made, index)
            if not _has_layout_of(gradient, target.variable):
                notes.append(f"{made.name}: AccumulateGrad copies a gradient of another layout")
    for key in keys:
        recorder.known.pop(key, None)
    for substitute in recorder.substitutes:
        recorder.known.pop(substitute.untyped_storage()._cdata, None)
    recorder.substitutes, recorder.log = [], []
    return gradients


def _adapted(recorder: Recorder, gradient: Any, target: Any, slot: int) -> tuple[Any, Code]:
    """validate_outputs: give a gradient the shape and dtype of the input that it belongs to."""
    if target is None or gradient is None:
        return gradient, []
    meta, code = target._input_metadata[slot], recorder.log
    recorder.on, recorder.log = True, []
    if tuple(gradient.shape) != tuple(meta.shape):
        gradient = gradient.sum_to_size(tuple(meta.shape))
    if gradient.dtype != meta.dtype:
        gradient = gradient.to(meta.dtype)
    recorder.on = False
    code, recorder.log = recorder.log, []
    return gradient, code


def _described(recorder: Recorder, gradient: Any, first: int, what: str, notes: list[str]) -> Any:
    if gradient is None:
        return None
    reference = recorder.known.get(gradient.untyped_storage()._cdata)
    if isinstance(reference, int) and reference >= first:
        source: Any = ["n", reference - first]
    elif isinstance(reference, list):
        source = reference
    else:
        source = ["?", 0]
        notes.append(f"{what}: it is not known where it comes from")
    if source[0] == "s":  # in the order of saving
        source = ["s", sorted(set(recorder.unpacked)).index(recorder.unpacked[source[1]])]
    return [*source, Size.product(*gradient.shape), gradient.element_size(), gradient._is_view()]


def _has_layout_of(gradient: torch.Tensor, variable: torch.Tensor) -> bool:
    """obeys_layout_contract (torch/csrc/autograd/utils/grad_layout_contract.h): dimensions of size 1 do not count."""
    strides = zip(gradient.shape, gradient.stride(), variable.stride(), strict=True)
    return all(one == other or size == 1 for size, one, other in strides)


def _mark_gradient(made: RawNode, index: int) -> None:
    """Note the storage that ends as a parameter's gradient."""
    kind, number = made.gradients[index][:2]
    if kind != "n":
        return
    for event in chain(made.code, *made.adapts):
        for allocation in event[5] if event[0] == "o" else []:
            if allocation[0] == number:
                allocation[2] = "g"


def _local(log: Code, first: int) -> Code:
    """Number the storages that a node makes from 0."""
    return [
        ["d", event[1] - first]
        if event[0] == "d"
        else [*event[:5], [[number - first, size, kind] for number, size, kind in event[5]]]
        for event in log
        if event[0] != "d" or event[1] >= first
    ]
