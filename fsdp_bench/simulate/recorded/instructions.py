"""Instructions that run: the recorded ones with plain numbers, and nodes of the graph that repeat recorded ones.

While a module runs, a Frame holds what Python's variables hold: storages, and the newest nodes. So a storage is freed
when neither a frame nor the graph holds it, as in torch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from fsdp_bench.simulate.autograd import Gradients, Node, Packed
from fsdp_bench.simulate.events import Category, Event, Stream
from fsdp_bench.simulate.losses import liger_fused_linear
from fsdp_bench.simulate.models.activation_checkpointing import requiring_grad
from fsdp_bench.simulate.models.transformer import Weight
from fsdp_bench.simulate.operators.core import Operators, Saved
from fsdp_bench.simulate.operators.kernel_workspaces import Workspace
from fsdp_bench.simulate.operators.kernels import INT64
from fsdp_bench.simulate.tape import Storage, Tensor
from fsdp_bench.spec.pointwise import STRIDED
from fsdp_bench.spec.recording.own_loss import LOSS

Edge = tuple[Any, int] | None
"""A node's number and its output, or a parameter's name and 0."""


class RunningModel(Protocol):
    """The part of a recorded model that its instructions use."""

    op: Operators
    by_name: dict[str, Any]
    by_parameter: dict[str, Weight]

    def mark_block(self, module: Any) -> None:
        """Mark where a block's part of forward begins."""

    def after_block(self, module: Any, out: "Outputs") -> None:
        """Mark where a block's part of backward begins."""


class Frame:
    """One run of one module."""

    __slots__ = ("edges", "nodes", "outer", "storages")

    def __init__(self, outer: "Frame | None" = None) -> None:
        self.outer: tuple[Frame, ...] = () if outer is None else (outer, *outer.outer)
        """Those of the modules around it, from the inside out."""
        self.storages: dict[int | str, Storage] = {}
        self.nodes: dict[int, Node] = {}
        self.edges: dict[tuple[int, int], tuple[Node | None, int]] = {}
        """Where gradients go that a wrapper redirected: the nodes of inputs and outputs of calls."""

    def drop(self, number: int | str) -> None:
        """Hold a storage no longer."""
        for frame in (self, *self.outer):
            frame.storages.pop(number, None)

    def storage(self, number: int | str) -> Storage | None:
        """Return a storage; None for one that this step does not own."""
        for frame in (self, *self.outer):
            if number in frame.storages:
                return frame.storages[number]
        return None

    def target(self, model: RunningModel, edge: Edge) -> tuple[Node | None, int]:
        """Return the node that a gradient goes to, and which of its outputs."""
        if edge is None:
            return None, 0
        number, output = edge
        if isinstance(number, str):
            seen = model.by_parameter[number].seen
            return seen.node, seen.output
        for frame in (self, *self.outer):
            if edge in frame.edges:
                return frame.edges[edge]
            if number in frame.nodes:
                return frame.nodes[number], output
        return None, 0

    def clear(self) -> None:
        """Hold nothing."""
        self.storages.clear()
        self.nodes.clear()
        self.edges.clear()


class TensorPlan(msgspec.Struct, frozen=True, gc=False):
    """A tensor that is passed on or saved."""

    storage: int | str
    numel: int
    itemsize: int
    edge: Edge = None


class Made(msgspec.Struct, frozen=True, gc=False):
    """A storage to make."""

    number: int
    num_bytes: int
    category: Category


class Run(msgspec.Struct, frozen=True):
    """An operator."""

    name: str
    event: Event | None
    makes: tuple[Made, ...]
    may_be_kept: bool
    """Whether selective checkpointing keeps its outputs where its policy names it."""
    uses_cublas: bool
    space: Workspace
    """Memory that its kernel allocates for itself."""

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Run it in forward."""
        op, tape = model.op, model.op.tape
        if self.may_be_kept and tape.kept is not None:
            self._take_or_make(frame, op)
            return
        self.issue(frame.storages, op)

    def issue(self, storages: dict[int | str, Storage], op: Operators, default: Category | None = None) -> None:
        """Issue the kernel; make the storages, and what it needs for itself."""
        tape = op.tape
        if self.event is not None:
            tape.events.append(self.event)
        held = op.scratch(self.space.before, self.name)
        for index, made in enumerate(self.makes):
            category = default if made.category is Category.ACTIVATIONS and default is not None else made.category
            storages[made.number] = tape.storage(made.num_bytes, self.name, category)
            if index == 1:
                held += op.scratch(self.space.after_second, self.name)
        held += op.scratch(self.space.after, self.name)
        if self.uses_cublas:
            op.make_workspace(tape.in_backward)

    def _take_or_make(self, frame: Frame, op: Operators) -> None:
        tape, held, last = op.tape, list[Storage](), len(self.makes) - 1
        for index, made in enumerate(self.makes):

            def make(made: Made = made, index: int = index) -> Tensor:
                if index == 0:
                    if self.event is not None:
                        tape.events.append(self.event)
                    held.extend(op.scratch(self.space.before, self.name))
                storage = tape.storage(made.num_bytes, self.name, made.category)
                for sizes, place in ((self.space.after_second, 1), (self.space.after, last)):
                    held.extend(op.scratch(sizes, self.name) if index == place else ())
                if index == 0 and self.uses_cublas:
                    op.make_workspace(tape.in_backward)
                return Tensor(storage, made.num_bytes, 1)

            out = op.saved_output(self.name, make)
            assert out.storage is not None
            frame.storages[made.number] = out.storage


class AddMask(msgspec.Struct, frozen=True):
    """Unfused attention's mask is added in place, unless selective checkpointing watches (areAnyTensorSubclassLike)."""

    product: int
    """The storage that the mask is added to."""
    addition: Run
    """The addition that makes a tensor."""

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Run it."""
        tape, product = model.op.tape, frame.storage(self.product)
        if tape.kept is not None or product is None:
            self.addition.run(frame, model)
            return
        if self.addition.event is not None:
            tape.events.append(self.addition.event)
        frame.storages[self.addition.makes[0].number] = product


class ReadToHost(msgspec.Struct, frozen=True, gc=False):
    """The host reads a number from the GPU: it waits until all work before has been done."""

    def run(self, _frame: Frame, model: RunningModel) -> None:
        """Wait."""
        model.op.tape.synchronize(Stream.COMPUTE)


class Forget(msgspec.Struct, frozen=True, gc=False):
    """Python drops a storage."""

    number: int | str

    def run(self, frame: Frame, _model: RunningModel) -> None:
        """Drop it."""
        frame.drop(self.number)


class RequireGrad(msgspec.Struct, frozen=True, gc=False):
    """A tensor that no node made needs a gradient from here on (requires_grad_)."""

    node: int
    """The number of its AccumulateGrad."""
    tensor: TensorPlan

    def run(self, frame: Frame, _model: RunningModel) -> None:
        """Make the node."""
        plan = self.tensor
        frame.nodes[self.node] = requiring_grad(Tensor(frame.storage(plan.storage), plan.numel, plan.itemsize))[0].node


class ForgetInEachBlock(msgspec.Struct, frozen=True, gc=False):
    """Python drops a storage of every block: what autocast has cast, when it ends."""

    first_block: int
    numbers: tuple[int, ...]
    """The storage in each block, from the first on."""

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Drop them, each as part of its block."""
        tape = model.op.tape
        for index, number in enumerate(self.numbers):
            tape.mark_block(self.first_block + index)
            frame.drop(number)
        tape.mark_block(-1)


class Begin(msgspec.Struct, frozen=True):
    """Autograd makes a node."""

    number: int
    edges: tuple[Edge, ...]
    num_outputs: int
    code: tuple[Run | Forget, ...]
    """The instructions that run in backward."""
    gradients: tuple[tuple[str, int, int, int, bool] | None, ...]
    adapts: tuple[tuple[Run | Forget, ...], ...]
    adapted: frozenset[int]
    """Storages that ``adapts`` makes."""

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Make the node."""
        tape = model.op.tape
        if not tape.grad_enabled:
            return
        tape.next_sequence += 1
        frame.nodes[self.number] = Node(
            tape.next_sequence,
            tape.stream,
            [frame.target(model, edge) for edge in self.edges],
            [None] * self.num_outputs,
            partial(self._backward, model.op),
            [],
        )

    def _backward(self, op: Operators, saved: Saved, gradients: list[Tensor]) -> Gradients:
        opened = saved.copy()
        local: dict[int | str, Storage] = {}
        _run_locally(self.code, local, op)
        found: list[Tensor | None] = []
        for each in self.gradients:
            if each is None or (each[0] == "n" and each[1] in self.adapted):
                found.append(None)
            else:
                found.append(_gradient(each, local, gradients, opened))
        del opened
        for index, code in enumerate(self.adapts):
            _run_locally(code, local, op)
            each = self.gradients[index]
            if found[index] is None and each is not None:
                found[index] = _gradient(each, local, gradients, [])
        local.clear()
        return found


class Keep(msgspec.Struct, frozen=True):
    """A node saves a tensor."""

    node: int
    tensor: TensorPlan
    as_view: bool
    """Whether a parameter is saved as a view, and not itself."""
    is_strided: bool

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Save it, through the hooks in force; a node that saves nothing does not hold them."""
        tape = model.op.tape
        node = frame.nodes.get(self.node) if tape.grad_enabled else None
        if node is None:
            return
        saved = self._tensor(frame, model)
        saved.is_strided = self.is_strided
        if not tape.hooks:
            node.saved.append(saved)
            return
        if type(node.saved) is list:
            node.saved = Packed(tape.hooks[-1], [])
        node.saved.packed += node.saved.hooks.pack([saved])

    def _tensor(self, frame: Frame, model: RunningModel) -> Tensor:
        plan = self.tensor
        if isinstance(plan.storage, str) and plan.storage.startswith("p:"):
            parameter = model.by_parameter[plan.storage[2:]].seen
            # a parameter itself follows when a wrapper gives it other memory (.data)
            return parameter.view(plan.numel) if self.as_view or self.is_strided else parameter
        return Tensor(frame.storage(plan.storage), plan.numel, plan.itemsize, is_on_host=plan.storage == "?")


def _run_locally(code: Sequence[Run | Forget], local: dict[int | str, Storage], op: Operators) -> None:
    for instruction in code:
        if type(instruction) is Forget:
            local.pop(instruction.number, None)
        else:
            assert type(instruction) is Run
            instruction.issue(local, op, Category.TEMPORARY)


def _gradient(
    each: tuple[str, int, int, int, bool], local: dict[int | str, Storage], given: list[Tensor], opened: list[Tensor]
) -> Tensor:
    source, index, numel, itemsize, is_view = each
    storage = None
    if source == "n":
        storage = local[index]
    elif source == "g":
        storage = given[index].storage
    elif source == "s":
        storage = opened[index].storage
    return Tensor(storage, numel, itemsize, None, 0, is_view)


class Outputs:
    """The tensors that a module returns; wrappers put hooks on all of them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @property
    def node(self) -> "Outputs | None":
        """Itself, if any of them needs a gradient: it stands for their nodes."""
        return self if any(tensor.node is not None for tensor in self.tensors) else None

    def before(self, hook: Callable[[], None]) -> None:
        """Call a hook when the gradients of one of the outputs are known, for each of them."""
        for tensor in self.tensors:
            if tensor.node is not None:
                tensor.node.before(hook)

    def first(self, hook: Callable[[], None]) -> None:
        """Call a hook before all others."""
        for tensor in self.tensors:
            if tensor.node is not None:
                tensor.node.pre_hooks = [hook, *(tensor.node.pre_hooks or ())]


class CallModule(msgspec.Struct, frozen=True):
    """A module runs."""

    module: str
    inputs: tuple[TensorPlan, ...]
    code: tuple[Any, ...]
    outputs: tuple[TensorPlan, ...]
    num_positional: int = -1
    """Inputs that are positional arguments; -1 where their number is not known."""

    def parameters(self) -> Iterator[str]:
        """Yield the names of the trained parameters that the module reads itself, not in a call of another one."""
        begins = (instruction for instruction in self.code if type(instruction) is Begin)
        for node, _ in (edge for begin in begins for edge in begin.edges if edge is not None):
            if isinstance(node, str):
                yield node

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Run it inside of what is around it; a module with nothing around it is part of its caller."""
        module = model.by_name[self.module]
        model.mark_block(module)
        if module.around is None and module.block < 0:
            for instruction in self.code:
                instruction.run(frame, model)
            return
        self._run_wrapped(frame, model, module)

    def _run_wrapped(self, frame: Frame, model: RunningModel, module: Any) -> None:
        inputs = tuple(tensor_of(frame, model, plan) for plan in self.inputs)
        times = 0

        def body(*given: Tensor) -> Outputs:
            nonlocal times
            times += 1
            return self._body(frame, model, given, is_recomputed=times > 1)

        out = body(*inputs) if module.around is None else module.around(body, *inputs)
        del inputs
        model.after_block(module, out)
        for plan, tensor in zip(self.outputs, out.tensors, strict=True):
            if isinstance(plan.storage, int) and tensor.storage is not None:
                frame.storages.setdefault(plan.storage, tensor.storage)
            if plan.edge is not None and not isinstance(plan.edge[0], str):
                frame.edges[plan.edge] = tensor.node, tensor.output

    def _body(self, frame: Frame, model: RunningModel, given: Sequence[Tensor], is_recomputed: bool) -> Outputs:
        own = Frame(frame)
        for plan, tensor in zip(self.inputs, given, strict=True):
            if isinstance(plan.storage, int) and tensor.storage is not None:
                own.storages[plan.storage] = tensor.storage
            if plan.edge is not None and not isinstance(plan.edge[0], str):
                own.edges[plan.edge] = tensor.node, tensor.output
        for instruction in self.code:
            instruction.run(own, model)
        out = Outputs([tensor_of(own, model, plan) for plan in self.outputs])
        if not is_recomputed:
            passed = {plan.storage for plan in (*self.inputs, *self.outputs)}
            for number, storage in own.storages.items():
                if number not in passed:
                    frame.storages[number] = storage  # an attribute or a cache: it outlives the module's call
            frame.nodes.update(own.nodes)
        own.clear()
        return out


def tensor_of(frame: Frame, model: RunningModel, plan: TensorPlan) -> Tensor:
    """Return a tensor that is passed on, with the node that its gradient goes to."""
    node, output = frame.target(model, plan.edge) if model.op.tape.grad_enabled else (None, 0)
    return Tensor(frame.storage(plan.storage), plan.numel, plan.itemsize, node, output, True)


def next_tokens(op: Operators, batch: int, length: int) -> Tensor:
    """Return the targets: labels that are padded by one and shifted, a copy unless there is one sequence."""
    padded = op.tape.tensor(batch * (length + 1), INT64, "aten::constant_pad_nd")
    op.run("aten::constant_pad_nd", padded, padded)
    if batch == 1:
        return padded.view(length)
    targets = op.tape.tensor(batch * length, INT64, "aten::clone")
    op.run("aten::clone", targets, targets, path=STRIDED)
    return targets


class RunHeadWithLoss(msgspec.Struct, frozen=True):
    """A loss that includes the head: train/models/model_code.py on the tape."""

    hidden_states: TensorPlan
    weight: str
    batch: int
    length: int

    def run(self, frame: Frame, model: RunningModel) -> None:
        """Run it inside of the model's forward."""
        op = model.op
        hidden_states = tensor_of(frame, model, self.hidden_states)
        weight = model.by_parameter[self.weight].seen
        out = liger_fused_linear(op, hidden_states, weight, next_tokens(op, self.batch, self.length))
        assert out.storage is not None
        assert out.node is not None
        frame.storages[LOSS] = out.storage
        frame.nodes[LOSS] = out.node
