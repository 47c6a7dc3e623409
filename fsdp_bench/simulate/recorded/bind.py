"""Binds a recording to one number of blocks, batch size and sequence length: formulas become numbers, loops unroll."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fsdp_bench.simulate.events import Category, Event, Kind, Work
from fsdp_bench.simulate.operators.kernel_workspaces import workspace_of
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.recorded.instructions import (
    AddMask,
    Begin,
    CallModule,
    Edge,
    Forget,
    ForgetInEachBlock,
    Keep,
    Made,
    ReadToHost,
    RequireGrad,
    Run,
    RunHeadWithLoss,
    TensorPlan,
)
from fsdp_bench.simulate.recorded.references import Scope, StandIn, Unrolled
from fsdp_bench.spec.checkpointing_policy import OPERATORS
from fsdp_bench.spec.pointwise import CASTING, STRIDED
from fsdp_bench.spec.recording.formula import evaluate
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.own_loss import LOSS, with_loss
from fsdp_bench.spec.recording.recorded import Ends, ModuleRecord, Variant
from fsdp_bench.spec.recording.steps import (
    Allocation,
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
    operator_name,
)
from fsdp_bench.spec.setup import Loss

_NAMEABLE = frozenset(name.replace(".", "::", 1) for name in OPERATORS)
"""Operators whose outputs selective checkpointing may keep."""
_ATTENTION = "aten::_scaled_dot_product_"
_FLASH_ATTN = "flash_attn::"
_EFFICIENT_ATTENTION = f"{_ATTENTION}efficient_attention"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
_CATEGORIES = {"": Category.ACTIVATIONS, "l": Category.LOGITS, "g": Category.GRADIENTS}

Shape = tuple[int, ...]


class BoundStep(msgspec.Struct, frozen=True):
    """A recorded step in plain numbers."""

    modules: list[ModuleRecord]
    parameters: dict[str, tuple[Shape, bool, str]]
    """Shape, whether it is trained, and the dtype that it is stored in, where it is not the setup's."""
    groups: dict[str, int]
    """The blocks in the order in which they run, each with the number of its group: an iteration of a loop, or the
    blocks before or behind one."""
    top: CallModule
    loss: TensorPlan
    """The loss, or the logits that another kind of loss is computed on."""
    buffers: tuple[tuple[int, int], ...]
    """Bytes, and the group of blocks that it belongs to; -1 outside of blocks."""
    ends: Ends | None
    batch: tuple[tuple[int, int, bool], ...]
    """Elements, bytes of one, and whether wrappers cast it, of each tensor of a batch."""


def bind(
    model: RecordedModel,
    variant: str,
    batch: int,
    length: int,
    kernels: Kernels,
    loss: Loss = Loss.PLAIN,
    inputs_need_grad: bool = False,
) -> BoundStep:
    """Return a recorded step in plain numbers.

    The loss ``plain`` is the one that was recorded. With ``inputs_need_grad`` a block whose inputs needed no gradient
    when it was recorded, as behind a frozen embedding, has one that does
    (PreTrainedModel.enable_input_require_grads): it then does as later ones.

    Raises SpecError for a loss that cannot be replaced.
    """
    step = with_loss(model.code, model.code.read(variant), loss)
    return _Binding(model, step, model.values(batch, length), kernels, inputs_need_grad).program()


_LINEAR = ("AddmmBackward0", "MmBackward0")


class _Binding:
    """The recording's own numbers, and what they are bound to."""

    def __init__(
        self, model: RecordedModel, variant: Variant, values: dict[str, int], kernels: Kernels, inputs_need_grad: bool
    ) -> None:
        self._code, self._counts, self._values = model.code, dict(model.counts), values
        self._variant, self._kernels, self._inputs_need_grad = variant, kernels, inputs_need_grad
        self._numbers = [evaluate(text, values) for text in variant.formulas]
        times = model.iterations()
        self._loops = [Unrolled(loop, index, times[index]) for index, loop in enumerate(variant.loops)]
        self._outside = Scope(self._loops)
        self._group_of = self._groups()
        self._products: dict[int, Begin] = {}
        self._first_blocks: dict[int, StandIn] = {}

    def program(self) -> BoundStep:
        variant = self._variant
        sources = dict(self._modules())
        return BoundStep(
            modules=list(sources),
            parameters=self._parameters(sources),
            groups=self._group_of,
            top=self._call(variant.top, self._outside),
            loss=self._tensor(variant.loss, self._outside),
            buffers=tuple(self._buffers()),
            ends=self._code.ends,
            batch=tuple((evaluate(i.numel, self._values), i.itemsize, i.is_float) for i in self._code.batch),
        )

    # -- modules and parameters ----------------------------------------------------------------------------------

    def _block_of(self, name: str) -> tuple[str, int] | None:
        """Return the list of blocks that a module or parameter is in, and its block's number; None outside of them."""
        path = next((path for path in self._code.num_blocks if name.startswith(f"{path}.")), None)
        return None if path is None else (path, int(name[len(path) + 1 :].partition(".")[0]))

    def _modules(self) -> Iterator[tuple[ModuleRecord, ModuleRecord]]:
        """Yield the modules, each with its record; those of blocks as often as there are blocks, named after them."""
        inside: defaultdict[tuple[str, int] | None, list[ModuleRecord]] = defaultdict(list)
        for module in self._code.modules:
            inside[self._block_of(module.name)].append(module)
        for module in inside[None]:
            yield module, module
            path = module.name
            for block in range(self._counts.get(path, 0)):
                source = self._source(path, block)
                for each in inside[path, source]:
                    name, *names = (
                        f"{path}.{block}{name.removeprefix(f'{path}.{source}')}"
                        for name in (each.name, *each.parameters)
                    )
                    yield ModuleRecord(name, each.kind, tuple(names)), each

    def _source(self, path: str, block: int) -> int:
        """Return the recorded block that is like a block."""
        recorded = self._code.num_blocks[path]
        loop = self._loop_of(path)
        if loop is None or block < loop.record.first:
            return block
        behind = self._counts[path] - block
        if behind <= recorded - loop.record.first - loop.record.iterations * loop.record.period:
            return recorded - behind
        return loop.record.first + (block - loop.record.first) % loop.record.period

    def _parameters(self, sources: Mapping[ModuleRecord, ModuleRecord]) -> dict[str, tuple[Shape, bool, str]]:
        recorded = {parameter.name: parameter for parameter in self._code.parameters}
        found = {}
        for module, source in sources.items():
            for name, recorded_name in zip(module.parameters, source.parameters, strict=True):
                parameter = recorded[recorded_name]
                shape = tuple(evaluate(size, self._values) for size in parameter.shape)
                found[name] = shape, parameter.is_trained, parameter.dtype
        return found

    def _buffers(self) -> Iterator[tuple[int, int]]:
        """Yield the buffers; those of blocks as often as there are blocks."""
        inside: defaultdict[tuple[str, int] | None, list[int]] = defaultdict(list)
        modules = self._variant.buffer_modules or ("",) * len(self._variant.buffers)
        for size, module in zip(self._variant.buffers, modules, strict=True):
            inside[self._block_of(module)].append(self._numbers[size])
        yield from ((num_bytes, -1) for num_bytes in inside[None])
        for path, count in self._counts.items():
            for block in range(count):
                for num_bytes in inside[path, self._source(path, block)]:
                    yield num_bytes, self._group_of[f"{path}.{block}"]

    def _loop_of(self, path: str) -> Unrolled | None:
        return next((one for one in self._loops if one.record.path == path), None)

    def _groups(self) -> dict[str, int]:
        groups: dict[str, int] = {}
        number = 0
        for path, count in self._counts.items():
            loop = self._loop_of(path)
            for block in range(count):
                groups[f"{path}.{block}"] = number
                if loop is None or self._ends_group(loop, block):
                    number += 1
            if loop is not None:
                number += 1
        return groups

    @staticmethod
    def _ends_group(loop: Unrolled, block: int) -> bool:
        """Whether the next block begins an iteration, or is the first behind the loop."""
        offset = block + 1 - loop.record.first
        return offset >= 0 and offset % loop.record.period == 0 and offset <= loop.iterations * loop.record.period

    # -- instructions --------------------------------------------------------------------------------------------

    def _call(self, call: Call, scope: Scope) -> CallModule:
        code: list[Any] = []
        products, reads = masked_products(call.code, self._variant.names), self._reads(call)
        for index, instruction in enumerate(call.code):
            if type(instruction) is Loop:
                loop = self._loops[instruction.number]
                for iteration in range(loop.iterations):
                    inside = scope.inside(loop, iteration)
                    code += [self._instruction(each, inside) for each in loop.record.code]
            elif self._inputs_need_grad and type(instruction) is Call and (first := self._first_block(instruction)):
                code += first
            else:
                if type(instruction) is Drop and ".*." in instruction.storage:
                    code += self._drop_of_first_block(instruction)
                product = products.get(index)
                bound = self._instruction(instruction, scope)
                code.append(bound if product is None else self._add_mask(bound, product, scope))
                if index in reads:
                    code.append(ReadToHost())
        inputs, outputs = (tuple(self._tensor(t, scope) for t in each) for each in (call.inputs, call.outputs))
        return CallModule(scope.name(call.module), inputs, tuple(code), outputs, call.num_positional)

    def _reads(self, call: Call) -> set[int]:
        """Return where transformers reads a result on the host in each forward; never inside of a block."""
        inside = any(call.module.startswith(f"{path}.") for path in self._code.num_blocks)
        return set() if inside or self._code.origin.code != "huggingface" else reads(call.code, self._variant.names)

    def _first_block(self, block: Call) -> tuple[RequireGrad, CallModule] | None:
        """Return a block whose inputs needed no gradient with the code of a later one; None for other blocks."""
        path, _, number = block.module.rpartition(".")
        loop = self._loop_of(path)
        if loop is None or block.inputs[0].edge:
            return None
        iteration, offset = divmod(int(number) - loop.record.first, loop.record.period)
        later = next(each for each in loop.record.code if type(each) is Call and each.module == f"{path}.<{offset}>")
        leaf = LOSS + 1 + loop.number
        places: dict[bool, dict[str, int | str]] = {False: {}, True: {}}
        for its, own in (
            *zip(later.inputs, block.inputs, strict=True),
            *zip(later.outputs, block.outputs, strict=True),
        ):
            places[False][its.storage] = self._outside.refer(own.storage)
            if its.edge:
                node = own.edge.partition("/")[0]
                places[True][its.edge.partition("/")[0]] = self._outside.refer(node, is_node=True) if node else leaf
        scope = self._first_blocks[loop.number] = StandIn(self._loops, loop, iteration, places)
        call = self._call(later, scope)
        return RequireGrad(leaf, call.inputs[0]), call

    def _drop_of_first_block(self, drop: Drop) -> Iterator[Forget]:
        """Yield the drop of what autocast has cast in the block that _first_block gave a later one's code."""
        loop, _ = self._outside.all_of(drop.storage)
        if (block := self._first_blocks.get(loop.number)) is not None:
            yield Forget(block.own(int(drop.storage.rpartition(".")[2])))

    def _drop(self, storage: str, scope: Scope) -> Forget | ForgetInEachBlock:
        if ".*." not in storage:
            return Forget(scope.refer(storage))
        loop, numbers = scope.all_of(storage)
        first = self._group_of[f"{loop.record.path}.{loop.record.first}"]
        return ForgetInEachBlock(first, tuple(numbers))

    def _instruction(self, instruction: Instruction, scope: Scope) -> Any:
        match instruction:
            case Drop():
                return self._drop(instruction.storage, scope)
            case Operator():
                return self._run(instruction, scope)
            case Save():
                return self._keep(instruction, scope)
            case HeadWithLoss():
                hidden_states = self._tensor(instruction.hidden_states, scope)
                return RunHeadWithLoss(hidden_states, instruction.weight, self._values["B"], self._values["S"])
            case MakeNode():
                return self._begin(instruction.number, scope)
            case Call():
                return self._call(instruction, scope)
        raise AssertionError("a loop is unrolled by its caller")

    def _run(self, operator: Operator, scope: Scope | None) -> Run:
        def made(each: Allocation) -> Made:
            number = each.number if scope is None else scope.own(each.number)
            return Made(number, self._numbers[each.num_bytes], _CATEGORIES[each.category])

        return run_of(operator, self._variant.names, self._numbers, self._kernels, made, self._values["S"])

    def _add_mask(self, addition: Run, product: Allocation, scope: Scope) -> AddMask:
        number = scope.own(product.number)
        makes = addition.makes or (Made(number, self._numbers[product.num_bytes], _CATEGORIES[product.category]),)
        out_of_place = msgspec.structs.replace(addition, name="aten::add", makes=makes, may_be_kept=True)
        return AddMask(number, out_of_place)

    def _begin(self, number: int, scope: Scope) -> Begin:
        n, loop = self._numbers, scope.loop
        record: NodeRecord = self._variant.nodes[number] if loop is None else loop.record.nodes[number]
        adapts = tuple(tuple(self._local(each) for each in code) for code in record.adapts)
        begin = Begin(
            number=scope.own(number, is_node=True),
            edges=tuple(self._edge(edge, scope) for edge in record.edges),
            num_outputs=record.num_outputs,
            code=tuple(self._local(each) for each in record.code),
            gradients=tuple(
                None if g is None else (g.source, g.index, n[g.numel], g.itemsize, g.is_view) for g in record.gradients
            ),
            adapts=adapts,
            adapted=frozenset(m.number for code in adapts for each in code if type(each) is Run for m in each.makes),
        )
        if record.name in _LINEAR:
            self._products[begin.number] = begin
        return begin

    def _keep(self, save: Save, scope: Scope) -> Keep:
        """Return where a node saves a tensor.

        F.linear multiplies by a weight's t(), which is a view, and saves that; transformers' Conv1D multiplies by the
        weight itself, so that its gradient goes from the product to the weight at once.
        """
        node, tensor = scope.refer(save.node, is_node=True), self._tensor(save.tensor, scope)
        assert isinstance(node, int)
        product, weight = self._products.get(node), str(tensor.storage).removeprefix("p:")
        return Keep(node, tensor, product is not None and (weight, 0) not in product.edges, save.is_strided)

    def _local(self, instruction: Instruction) -> Run | Forget:
        if type(instruction) is Drop:
            return Forget(int(instruction.storage))
        assert type(instruction) is Operator
        return self._run(instruction, None)

    def _tensor(self, tensor: TensorRef, scope: Scope) -> TensorPlan:
        storage = scope.refer(tensor.storage)
        return TensorPlan(storage, self._numbers[tensor.numel], tensor.itemsize, self._edge(tensor.edge, scope))

    @staticmethod
    def _edge(edge: str, scope: Scope) -> Edge:
        if not edge:
            return None
        if edge.startswith("p:"):
            return scope.name(edge[2:]), 0
        node, _, output = edge.rpartition("/")
        return scope.refer(node, is_node=True), int(output)


def masked_products(code: Sequence[Instruction], names: Sequence[str]) -> dict[int, Allocation]:
    """Return the places where unfused attention adds its mask, each with the product that it adds it to.

    Some recordings were made where a dispatch mode watches, so that the addition makes a tensor; others add in place.
    """
    found: dict[int, Allocation] = {}
    product, addition = None, -1
    for index, each in enumerate(code):
        if type(each) is not Operator:
            continue
        name, *_ = operator_name(names[each.name])
        if name in _PRODUCTS:
            product, addition = next(iter(each.makes), None), -1
        elif name in ("aten::add", "aten::add_"):
            addition = index
        elif each.makes:
            if name == "aten::_safe_softmax" and product is not None and addition >= 0:
                found[addition] = product
            product = None
    return found


def reads(code: Sequence[Instruction], names: Sequence[str]) -> set[int]:
    """Return the places where transformers asks the GPU whether sequences are packed, and the host waits.

    find_packed_sequence_indices in masking_utils.py: ``(position_diff != 1).cumsum(-1)``, and ``.all()`` in an ``if``.
    Position ids that RoBERTa and OPT add up from a mask nobody reads; these sum what is no comparison's own result.
    """
    found, before = set[int](), ""
    for index, each in enumerate(code):
        if type(each) is not Operator:
            continue
        name, *_ = operator_name(names[each.name])
        if name == "aten::cumsum" and before == "aten::ne":
            found.add(index)
        if name != "prim::device":
            before = name
    return found


def run_of(
    operator: Operator,
    names: Sequence[str],
    numbers: Sequence[int],
    kernels: Kernels,
    made: Callable[[Allocation], Made],
    num_keys: int = 1,
) -> Run:
    """Return a recorded operator in plain numbers.

    ``names`` are the recording's of operators, ``numbers`` the values of its formulas; ``made`` binds what the operator
    makes. ``num_keys`` are the keys of unfused attention, for recordings that do not have its sizes.
    """
    name, layout, outer = operator_name(names[operator.name])
    dims, num_bytes = tuple(numbers[dim] for dim in operator.dims), numbers[operator.num_bytes]
    results = tuple(numbers[each.num_bytes] for each in operator.makes)
    work = work_of(name, layout, dims, num_bytes, operator.itemsize)
    if name == "aten::slice_backward" and results:
        work = slice_backward(num_bytes - results[0], results[0], operator.itemsize)
    return Run(
        name=name,
        event=None if work is None else Event(Kind.KERNEL, -1, label=work.name, work=work),
        makes=tuple(map(made, operator.makes)),
        may_be_kept=name in _NAMEABLE and not outer and bool(operator.makes),
        uses_cublas=name in _PRODUCTS,
        space=workspace_of(name, dims, operator.itemsize, kernels, num_bytes, results, num_keys),
    )


def slice_backward(gradient_bytes: int, result_bytes: int, itemsize: int) -> Work:
    """Return the work of aten::slice_backward: zeros, and the gradient's copy to its place among them."""
    num_bytes, elements = 2 * gradient_bytes + result_bytes, gradient_bytes // itemsize
    return Work("aten::slice_backward", num_bytes, (), itemsize, path=STRIDED, elements=elements)


def work_of(name: str, layout: str, dims: tuple[int, ...], num_bytes: int, itemsize: int) -> Work | None:
    """Return what an operator computes and moves; None for one that does neither."""
    if layout.startswith((STRIDED, CASTING)):
        return Work(name, num_bytes, (), itemsize, path=layout, elements=dims[0])
    if layout:
        return Work(f"aten::mm {layout}", num_bytes, dims, itemsize)
    if name.startswith((_ATTENTION, _FLASH_ATTN)):
        batch, heads, groups, length, keys, head_dim, is_causal = dims[:7]
        ending = "_backward" if name.endswith("_backward") else ""
        attention = batch, heads, heads // groups, length, head_dim, keys, is_causal
        if name.startswith(_FLASH_ATTN):
            return Work(name, num_bytes, attention, itemsize)
        kind = "efficient_attention" if name.startswith(_EFFICIENT_ATTENTION) else "attention"
        return Work(f"aten::scaled_dot_product_{kind}{ending}", num_bytes, attention, itemsize)
    elements = dims[0] * dims[2] if name == "aten::embedding_dense_backward" and dims else 0
    return Work(name, num_bytes, (), itemsize, elements=elements) if num_bytes else None
