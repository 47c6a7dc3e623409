"""The module tree of a recorded model, and its forward pass with its loss."""

from collections.abc import Iterator
from math import prod

from fsdp_bench.simulate.models.transformer import EndModules, Module, ModuleList, SimulatedModel, Weight
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.recorded.bind import BoundStep
from fsdp_bench.simulate.recorded.instructions import CallModule, Forget, ForgetInEachBlock, Frame, Outputs
from fsdp_bench.simulate.tape import Storage, Tensor

_OF_FORWARD = (CallModule, Forget, ForgetInEachBlock)
"""The model's call, and what Python and autocast drop when it ends. The instructions after these are the loss's."""


class RecordedModule(Module):
    """A module of the recorded model; the instructions have its code."""

    def __init__(self, op: Operators, name: str, kind: str) -> None:
        super().__init__(op)
        self.name, self.kind = name, kind
        self.block = -1
        """The number of the block that it is, or of the group of blocks; -1 for other modules."""


class RecordedList(RecordedModule, ModuleList):
    """An nn.ModuleList."""


class RecordedTransformer(SimulatedModel):
    """A recorded model with some number of blocks."""

    block = -1

    def __init__(self, op: Operators, program: BoundStep, num_blocks: int, extra_blocks: int) -> None:
        super().__init__(op, num_blocks, extra_blocks)
        _root, *rest = program.modules
        self.program = program
        self.by_name: dict[str, RecordedModule | RecordedTransformer] = {"": self}
        for each in rest:
            module = (RecordedList if each.kind == "ModuleList" else RecordedModule)(op, each.name, each.kind)
            self.by_name[each.name] = module
            self.by_name[each.name.rpartition(".")[0]].child(module)
        self.by_parameter = {
            full: self._weight(self.by_name[each.name], full) for each in program.modules for full in each.parameters
        }
        self.blocks = [self.by_name[name] for name in program.groups]
        for name, group in program.groups.items():
            block = self.by_name[name]
            block.block = group
            for weight in block.all_weights:
                weight.block = group
        for call in self.calls():
            if call.num_positional >= 0:
                self.by_name[call.module].num_positional = call.num_positional
        self._is_in_block = self._is_marked = False

    @property
    def ends(self) -> EndModules | None:
        """The modules that the code's ends are."""
        found = self.program.ends
        if found is None:
            return None
        return EndModules(*(tuple(self.by_name[name] for name in names) for names in found))

    def _weight(self, module: Module, full: str) -> Weight:
        shape, is_trained, dtype = self.program.parameters[full]
        weight = module.own(full, shape[0] if shape else 1, prod(shape[1:]) if len(shape) > 1 else None)
        weight.shape = shape
        weight.is_trained = is_trained
        weight.is_copied = False  # filled in place (PreTrainedModel._init_weights), or moved from host memory
        weight.dtype = dtype
        return weight

    def reads(self) -> dict[int, list[Weight]]:
        """Return the weights that each module reads, by its id."""
        return {
            id(self.by_name[call.module]): [self.by_parameter[name] for name in call.parameters()]
            for call in self.calls()
        }

    def forward_order(self) -> Iterator[Module]:
        """Yield modules in the order in which they are called first."""
        yield from (self.by_name[name] for name in dict.fromkeys(call.module for call in self.calls()))

    def calls(self) -> Iterator[CallModule]:
        """Yield the calls of all modules, in order; the first is the step's, around the model's."""
        return _calls(self.program.top)

    def forward_to_loss(self, inputs: dict[int | str, Storage]) -> tuple[Tensor, Frame]:
        """Run forward and the recorded loss; a program without one ends with the logits.

        ``inputs`` are those that a wrapper made anew, by their reference. Returns the loss or the logits, and the frame
        that holds the model's output; whoever drops that clears the frame.
        """
        frame, plan = Frame(), self.program.loss
        frame.storages.update(inputs)
        code = self.program.top.code
        first = next((index for index, each in enumerate(code) if type(each) not in _OF_FORWARD), len(code))
        for instruction in code[:first]:
            instruction.run(frame, self)
        self.op.tape.mark("loss")
        for instruction in code[first:]:
            instruction.run(frame, self)
        node, output = frame.target(self, plan.edge)
        return Tensor(frame.storage(plan.storage), plan.numel, plan.itemsize, node, output), frame

    def mark_block(self, module: "RecordedModule | RecordedTransformer") -> None:
        """Mark where a block's part of forward begins; what comes between two blocks is the first one's."""
        tape = self.op.tape
        if tape.in_backward:
            return
        if module.block >= 0:
            tape.mark(tape.phase, module.block)
            self._is_in_block = self._is_marked = True
        elif self._is_marked and not self._is_in_block:
            tape.mark(tape.phase, -1)
            self._is_marked = False

    def after_block(self, module: "RecordedModule | RecordedTransformer", out: Outputs) -> None:
        """Mark where the block's part of backward begins."""
        if module.block < 0:
            return
        self._is_in_block = False
        tape, block = self.op.tape, module.block
        out.first(lambda: tape.mark("backward", block))


def _calls(call: CallModule) -> Iterator[CallModule]:
    """Yield a call and all inside of it, in order."""
    yield call
    for instruction in call.code:
        if type(instruction) is CallModule:
            yield from _calls(instruction)
