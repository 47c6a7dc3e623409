"""PyTorch's autograd without data: the graph and its engine.

A tensor (tape.py) has a size and no data. It lives as long as in torch: Python's reference counts free a storage when
its last tensor, saved variable or gradient buffer is gone (CPython only). So the model and the wrappers are written as
torch's code is written, and the order of allocations and frees follows.

The engine is that of torch/csrc/autograd/engine.cpp: of the nodes whose gradients are all there, the one that was
created last runs first (ReadyQueue), except gradient accumulators, which run at once (AccumulateGrad's
sequence number is the largest). A node's gradients are released after it ran, then what it saved (evaluate_function),
then its outputs are handed on, where a second gradient for the same input is added (input_buffer.cpp).

A node runs on the stream on which its operator ran in forward (Node::stream). A gradient that goes to a node of another
stream is used there, too: the consumer waits for the producer, and the storage is recorded on its stream.
"""

import heapq
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fsdp_bench.simulate.events import Category, Queue, Stream
from fsdp_bench.simulate.tape import Tape, Tensor
from fsdp_bench.spec.pointwise import STRIDED

_COMPUTE = Stream.COMPUTE

Gradients = Sequence[Tensor | None]
Backward = Callable[[Any, list[Tensor]], Gradients]
"""Called with what the node saved (a list, or Packed) and with its gradients; returns a gradient for each edge."""


class Packed(msgspec.Struct, eq=False):
    """The tensors that a node saved under saved-tensor hooks; unpacked once, all together.

    Generated backward functions open their saved variables first and hold them until they return
    (torch/csrc/autograd/generated/Functions.cpp). Gradients are summed to a smaller shape after that
    (validate_outputs in engine.cpp).
    """

    hooks: Any
    packed: Any
    """The result of the hooks' ``pack``."""

    def copy(self) -> list[Tensor]:
        """Unpack the tensors. For tensors saved without hooks, a list's own ``copy`` does the same."""
        found: list[Tensor] = self.hooks.unpack(self.packed)
        return found

    def pop(self) -> None:
        """Do nothing: nothing else holds the unpacked tensors."""


class Node(msgspec.Struct, eq=False):
    """One operator in the graph, or the accumulator of a parameter's gradient."""

    sequence: int
    """Counts operators; of an accumulator LEAF."""
    stream: Stream
    """The one on which the operator ran."""
    edges: "Sequence[tuple[Node | None, int]]"
    """The nodes that made its inputs, with the number of their output; None where no gradient is needed."""
    buffer: list[Tensor | None]
    """The gradients of the outputs that have arrived."""
    backward: Backward | None = None
    saved: Any = None
    """Saved tensors for ``backward``: a list, or Packed; None after ``backward`` ran."""
    accumulate: Callable[[Tensor], None] | None = None
    """AccumulateGrad alone: takes the gradient of a parameter."""
    waiting: int = 0
    """The number of gradients that are still to come."""
    waits_for: Stream | None = None
    """Another stream, on which its incoming gradients were computed; it waits for that stream."""
    event: Queue | None = None
    """The queue in which an event of that stream was recorded when the last gradient had arrived; None: none was."""
    pre_hooks: list[Callable[[], None]] | None = None
    """Called when all its gradients have arrived, before it runs (Tensor.register_hook on its output)."""

    def before(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` when the gradients of the outputs are known."""
        self.pre_hooks = [*(self.pre_hooks or ()), hook]


def operator_node(
    tape: Tape, backward: Backward, inputs: Sequence[Tensor], saved: list[Tensor], num_outputs: int = 1
) -> Node:
    """Return the node of an operator that runs now, on the current stream; saved tensors go through the hooks."""
    tape.next_sequence += 1
    return Node(
        tape.next_sequence,
        tape.stream,
        [(tensor.node, tensor.output) for tensor in inputs],
        [None] * num_outputs,
        backward,
        Packed(tape.hooks[-1], tape.hooks[-1].pack(saved)) if saved and tape.hooks else saved,
    )


_QUEUES = Queue.GRADIENTS, Queue.GRADIENTS_BEFORE
LEAF = 1 << 62
"""The sequence number of accumulators (UINT64_MAX in torch), larger than any other."""


def accumulator(accumulate: Callable[[Tensor], None], stream: Stream = _COMPUTE) -> Node:
    """Return AccumulateGrad: where the gradient of a parameter ends."""
    return Node(LEAF, stream, (), [None], accumulate=accumulate)


class Engine:
    """Runs one backward pass."""

    def __init__(self, tape: Tape, accumulates_in_place: bool) -> None:
        self.tape = tape
        self.accumulates_in_place = accumulates_in_place
        self.is_running = False
        """Whether a backward pass runs (torch._C._current_graph_task_id)."""
        self.callbacks: list[Callable[[], None]] = []
        """Called when all gradients are computed (Variable._execution_engine.queue_callback)."""
        self._ready: list[tuple[int, int, Node]] = []
        self._pushed = 0
        self._recorded: dict[Queue, deque[int]] = {queue: deque() for queue in _QUEUES}
        """The sequence numbers of the nodes that will wait for the events of a queue, in their order."""
        self._leaf_stream = _COMPUTE
        """Where the last accumulator ran; they all run on one."""

    def run_inside(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compute all gradients below several tensors, each with its gradient, while a node runs (reentrant backward).

        Ready nodes of the outer pass wait (ReadyQueue prefers the deeper pass); callbacks are of the inner one.
        """
        outer = self._ready, self.callbacks, self._leaf_stream
        self._ready, self.callbacks, self._leaf_stream = [], [], _COMPUTE
        if len(roots) == 1:
            self.run(*roots[0])
        else:  # GraphRoot
            tape, gradients = self.tape, [gradient for _, gradient in roots]
            node = operator_node(tape, lambda _saved, _gradients: gradients, [root for root, _ in roots], [])
            self.run(Tensor(None, 0, 0, node), gradients[0])
        self._ready, self.callbacks, self._leaf_stream = outer
        self.is_running = self.tape.in_backward = True

    def run(self, root: Tensor, gradient: Tensor) -> None:
        """Compute all gradients below ``root``."""
        assert root.node is not None
        self.is_running = self.tape.in_backward = True
        self._count(root.node)
        tape, node = self.tape, root.node
        grad_enabled, tape.grad_enabled, stream = tape.grad_enabled, False, tape.stream
        node.buffer[root.output] = gradient
        del gradient, root
        self._push(node)
        while self._ready:
            node = heapq.heappop(self._ready)[2]
            tape.stream = node.stream
            if node.waits_for is not None:
                self._wait(node)
            if node.pre_hooks:
                hooks, node.pre_hooks = node.pre_hooks, None  # which may hold the node itself
                for hook in hooks:
                    hook()
                del hooks, hook
            if node.accumulate is not None:
                self._leaf_stream = node.stream
                gradients, node.buffer = node.buffer, [None]
                node.accumulate(gradients.pop())  # type: ignore[arg-type]
            else:
                self._evaluate(node)
        if self._leaf_stream is not stream:  # exec_post_processing
            tape.wait_stream(stream, self._leaf_stream)
        tape.stream = stream
        del node
        for callback in self.callbacks:
            callback()
        self.callbacks.clear()
        tape.grad_enabled = grad_enabled
        self.is_running = tape.in_backward = False

    def _push(self, node: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._ready, (-node.sequence, self._pushed, node))

    def _count(self, root: Node) -> None:
        """Count for each node the gradients that it waits for (Engine::compute_dependencies)."""
        seen, stack = {root}, [root]
        while stack:
            for node, _ in stack.pop().edges:
                if node is not None:
                    node.waiting += 1
                    if node not in seen:
                        seen.add(node)
                        stack.append(node)

    def _evaluate(self, node: Node) -> None:
        assert node.backward is not None, "the graph was freed"
        gradients, backward, saved = node.buffer, node.backward, node.saved
        node.buffer, node.backward, node.saved = [], None, None
        outputs = list(backward(saved, gradients))  # type: ignore[arg-type]
        gradients.clear()
        del saved, backward
        assert len(outputs) == len(node.edges), "a gradient for each input"
        for position, (target, slot) in enumerate(node.edges):
            if target is None:
                continue
            gradient, outputs[position] = outputs[position], None
            if gradient is not None:
                if target.stream is not node.stream:
                    target.waits_for = node.stream
                    if gradient.storage is not None:
                        self.tape.record_stream(gradient.storage, target.stream)
                if target.buffer[slot] is None:
                    target.buffer[slot] = gradient
                else:
                    if target.waits_for is not None:
                        self.tape.wait_stream(target.stream, target.waits_for)
                    self._add(target, slot, gradient.is_strided)
                del gradient
            target.waiting -= 1
            if not target.waiting:
                self._record(target)
                self._push(target)

    def _record(self, node: Node) -> None:
        """Record what a node waits for: what is issued until it runs is not among it.

        The oldest event of a queue is waited for first. Younger nodes run first, so an event goes to a queue whose
        nodes are all younger.
        """
        if node.waits_for is None:
            return
        for queue, waiting in self._recorded.items():
            if not waiting or waiting[-1] > node.sequence:
                waiting.append(node.sequence)
                self.tape.record_event(node.waits_for, queue)
                node.event = queue
                return

    def _wait(self, node: Node) -> None:
        assert node.waits_for is not None
        if node.event is None:
            self.tape.wait_stream(node.stream, node.waits_for)
        else:
            oldest = self._recorded[node.event].popleft()
            assert oldest == node.sequence, "a node runs before one whose gradients were there earlier"
            self.tape.wait_event(node.stream, node.event)
        node.waits_for = node.event = None

    def _add(self, target: Node, slot: int, is_strided: bool) -> None:
        """InputBuffer::add: add a second gradient to the first one, in place where nobody else can see that.

        On the consumer's stream, after that has waited for a producer on another one. ``is_strided``: whether the
        second one is, as the gradient of a product with a broadcast factor.
        """
        buffer, tape = target.buffer, self.tape
        first = buffer[slot]
        assert first is not None
        path = STRIDED if first.is_strided is not is_strided else ""
        num_bytes, elements = 3 * first.numel * first.itemsize, first.numel if path else 0
        tape.kernel("aten::add", num_bytes, first.itemsize, target.stream, path, elements)
        if self.accumulates_in_place and is_last_reference(first):
            return
        storage = tape.storage(first.numel * first.itemsize, "aten::add", Category.TEMPORARY, target.stream)
        buffer[slot] = Tensor(storage, first.numel, first.itemsize)


def is_last_reference(gradient: Tensor) -> bool:
    """can_accumulate_inplace: whether a buffer alone holds it and its storage; a view holds its base as well.

    The buffer and its user, which is two, this function's argument and getrefcount's.
    """
    return not gradient.is_view and sys.getrefcount(gradient) <= 4 and sys.getrefcount(gradient.storage) <= 2
