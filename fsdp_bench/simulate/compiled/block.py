"""A compiled block: one node of the graph, whose forward and backward allocate what Inductor's code allocates."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fsdp_bench.simulate.autograd import Gradients, operator_node
from fsdp_bench.simulate.events import Category, Kind
from fsdp_bench.simulate.models.transformer import Weight
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.recorded.bind import run_of
from fsdp_bench.simulate.recorded.instructions import Made, Outputs, Run
from fsdp_bench.simulate.tape import Storage, Tape, Tensor
from fsdp_bench.spec.recording.compiled import CompiledCode, Step, Tuning
from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.spec.recording.steps import Allocation, Drop

# -- The memory that Inductor allocates while it tries a kernel's configurations, when the kernel first runs -----------

_CONFIGURATIONS = 2
"""Configurations of a kernel without reductions; further ones would take the same memory again."""


_TUNING = "Inductor's tuning"


def tune(op: Operators, copies: Sequence[int], saves_memory: bool) -> None:
    """Run a kernel on copies, with a buffer that flushes the L2 cache between two runs, for each configuration.

    InductorBenchmarker.benchmark_gpu: the kernel runs once before it makes the buffer. In backward and in optimizers
    copies are on the device only if they do not raise the peak, which the first configuration's buffer may have raised
    (CachingAutotuner.copy_args_to_cpu_if_needed; ``optimize_mem`` is set where no graph is made).

    ``copies`` are the bytes of what the kernel changes in place; ``saves_memory`` is set where no graph is made.
    """
    tape = op.tape
    tape.synchronize_device()
    for _ in range(_CONFIGURATIONS):
        held = _within(_room(tape), copies) if saves_memory else copies
        op.scratch(held, _TUNING)
        buffer = op.scratch([op.kernels.l2_bytes], _TUNING)
        op.scratch(held, _TUNING)
        del buffer


def _room(tape: Tape) -> int:
    """Return by how much live memory is below the peak of this phase; trials reset peaks where a phase begins."""
    events, level, highest = tape.events, 0, 0
    others = (index for index in reversed(range(len(events))) if events[index].kind is Kind.MARK)
    before = next((index for index in others if events[index].label != tape.phase), -1)
    begin = next((index for index in range(before + 1, len(events)) if events[index].kind is Kind.MARK), 0)
    for event in events[begin:]:
        if event.kind is Kind.ALLOCATE:
            level += event.num_bytes
            highest = max(highest, level)
        elif event.kind is Kind.FREE:
            level -= event.num_bytes
    return highest - level


def _within(room: int, copies: Sequence[int]) -> list[int]:
    found = []
    for num_bytes in copies:
        if num_bytes <= room:
            room -= num_bytes
            found.append(num_bytes)
    return found


class Tune(msgspec.Struct):
    """Where a kernel is tuned when it first runs."""

    copies: tuple[int, ...]
    is_done: bool = False


Plan = Run | Tune | int
"""The instructions; the number of a storage is where it is dropped."""


class Buffers(msgspec.Struct, frozen=True):
    """A recording in plain numbers. The blocks of a model share it, as they share the compiled code."""

    code: CompiledCode
    forward: tuple[Plan, ...]
    backward: tuple[Plan, ...]
    backward_inputs: tuple[int, ...] = ()
    """Bytes of what backward takes, where they are recorded."""

    @property
    def backward_peak(self) -> int:
        """The most bytes alive in backward, as Inductor counts them: without rounding and kernels' workspaces."""
        sizes = dict(enumerate(self.backward_inputs))
        level = highest = sum(sizes.values())
        for step in self.backward:
            if isinstance(step, Run):
                sizes |= {made.number: made.num_bytes for made in step.makes}
                level += sum(made.num_bytes for made in step.makes)
                highest = max(highest, level)
            elif isinstance(step, int):
                level -= sizes.get(step, 0)
        return highest


def bind_code(code: CompiledCode, sizes: Mapping[str, int], kernels: Kernels) -> Buffers:
    """Return a recording for one model, batch and GPU."""
    numbers = [evaluate(text, sizes) for text in code.formulas]
    gradients = {
        number
        for number, name in zip(code.gradients, code.inputs, strict=True)
        if number is not None and not name.startswith("i:")
    }

    def bound(one: Step, of_parameters: set[int]) -> Plan:
        def made(each: Allocation) -> Made:
            category = Category.GRADIENTS if each.number in of_parameters else Category.ACTIVATIONS
            return Made(each.number, numbers[each.num_bytes], category)

        if isinstance(one, Drop):
            return int(one.storage)
        if isinstance(one, Tuning):
            return Tune(tuple(numbers[copy] for copy in one.copies))
        return run_of(one, code.names, numbers, kernels, made)

    return Buffers(
        code,
        tuple(bound(one, set()) for one in code.forward),
        tuple(bound(one, gradients) for one in code.backward),
        tuple(numbers[size] for size in code.backward_inputs),
    )


class CompiledBlock:
    """The wrapper that runs instead of a block's forward."""

    def __init__(self, op: Operators, buffers: Buffers, weights: Mapping[str, Weight], is_recorded: bool) -> None:
        self._op, self._buffers, self._weights, self._is_recorded = op, buffers, weights, is_recorded

    def __call__(self, _forward: Any, *inputs: Tensor) -> Any:
        """Run AOTAutograd's CompiledFunction; return what the block does."""
        code = self._buffers.code
        given = [inputs[int(name[2:])] if name.startswith("i:") else self._weights[name].seen for name in code.inputs]
        storages: dict[int | str, Storage] = {
            number: tensor.storage for number, tensor in enumerate(given) if tensor.storage is not None
        }
        self._steps(self._buffers.forward, storages, None)
        x = inputs[0]
        out = Tensor(storages[code.output], x.numel, x.itemsize)
        if self._op.tape.grad_enabled:
            saved = [_whole(storages.get(number)) for number in code.saved]
            out.node = operator_node(self._op.tape, self._backward, given, saved)
        return Outputs([out]) if self._is_recorded else out

    def _backward(self, saved: Any, gradients: list[Tensor]) -> Gradients:
        """Run the compiled backward, to which what was saved belongs: it frees each tensor after its last use."""
        code, storages = self._buffers.code, dict[int | str, Storage]()
        for number, tensor in enumerate([*saved, gradients[0]]):
            if tensor.storage is not None:
                storages[number] = tensor.storage
        saved.clear()
        x = gradients[0]
        del tensor
        self._steps(self._buffers.backward, storages, Category.TEMPORARY)
        found: list[Tensor | None] = []
        for name, gradient in zip(code.inputs, code.gradients, strict=True):
            if gradient is None:
                found.append(None)
            else:
                like = x if name.startswith("i:") else self._weights[name].seen
                found.append(Tensor(storages[gradient], like.numel, x.itemsize))
        return found

    def _steps(self, steps: Sequence[Plan], storages: dict[int | str, Storage], category: Category | None) -> None:
        for step in steps:
            if isinstance(step, int):
                storages.pop(step, None)
                continue
            if isinstance(step, Tune):
                if not step.is_done:
                    tune(self._op, step.copies, saves_memory=self._op.tape.in_backward)
                    step.is_done = True
                continue
            step.issue(storages, self._op, category)


def _whole(storage: Storage | None) -> Tensor:
    """Return a storage as a tensor; None for a parameter's, which its wrapper owns."""
    return Tensor(storage, 0 if storage is None else storage.num_bytes, 1)
