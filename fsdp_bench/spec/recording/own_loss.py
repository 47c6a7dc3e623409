"""The loss that a recorded causal language model computes itself: where it is in a recorded step, and the step without.

Hugging Face's ForCausalLMLoss casts the logits to fp32, pads and shifts the labels, and computes their cross-entropy.
All of it comes last in the model's forward, so that another kind of loss can take its place.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.recorded import RecordedCode, Variant
from fsdp_bench.spec.recording.steps import (
    Call,
    Drop,
    HeadWithLoss,
    Instruction,
    MakeNode,
    Operator,
    Save,
    TensorRef,
    operator_name,
)
from fsdp_bench.spec.setup import Loss

_NODES = ("NllLossBackward0", "LogSoftmaxBackward0", "ViewBackward0", "ToCopyBackward0")
"""From the loss to the logits."""
_SHIFT = "aten::constant_pad_nd"
_OPERATORS = (
    *("aten::_to_copy", _SHIFT, "aten::clone", "aten::_log_softmax", "aten::nll_loss_forward"),
    *("prim::device", "aten::_unsafe_view"),
)
LOSS = 1 << 31
"""The number of the storage and of the node of a loss that includes the head; nothing recorded has one as large."""


class _OwnLoss(NamedTuple):
    """Where the loss is."""

    around: tuple[Call, ...]
    """The calls that the model's is inside of, the outermost first: those of what PEFT puts around it."""
    model: Call
    begin: int
    """The first of its instructions that belongs to the loss."""
    logits: TensorRef


def with_loss(code: RecordedCode, variant: Variant, kind: Loss) -> Variant:
    """Return a step that ends with logits, or another loss with the head. Raises SpecError for an unusual own loss."""
    if kind is Loss.PLAIN:
        return variant
    found = _find(code, variant)
    if kind.includes_head:
        head, last = _head(found, variant, kind)
        before, behind = found.model.code[:head], found.model.code[head + 1 :]
        loss = TensorRef(str(LOSS), variant.loss.numel, variant.loss.itemsize, f"{LOSS}/0")
        model = replace(found.model, code=(*before, last, *_kept(behind, found)), outputs=(loss,))
        return replace(variant, top=_with_model(found.around, model), loss=loss)
    outputs = tuple(tensor for tensor in found.model.outputs if tensor.edge != variant.loss.edge)
    before = found.model.code[: found.begin]
    model = replace(found.model, code=(*before, *_kept(found.model.code[found.begin :], found)), outputs=outputs)
    return replace(variant, top=_with_model(found.around, model), loss=found.logits)


@lru_cache(maxsize=256)
def why_not_replaced(code: RecordedCode, kind: Loss) -> str | None:
    """Return why a recorded model's own loss cannot be replaced by another kind; None if it can."""
    if kind is Loss.PLAIN:
        return None  # without reading what was recorded
    try:
        with_loss(code, code.read(next(iter(code.variants))), kind)
    except SpecError as error:
        return str(error)
    return None


def _find(code: RecordedCode, variant: Variant) -> _OwnLoss:
    if code.origin.code != "huggingface":
        whose = "your own model's" if code.origin.code == "module" else "torchtitan's"
        raise SpecError(f"loss: {whose} is not replaced by another kind; leave --loss out")
    around = [variant.top]
    while (inside := _returning(around[-1], variant.loss)) is not None:
        around.append(inside)
    model = around.pop()
    logits = _logits(code, variant, model)
    begin = 1 + next(number for number, each in enumerate(model.code) if _makes(each, logits.storage))
    names = {operator_name(variant.names[each.name])[0] for each in model.code[begin:] if isinstance(each, Operator)}
    if others := sorted(names - set(_OPERATORS)):
        raise SpecError(f"loss: {code.origin.architecture} runs {others[0]} beside its cross-entropy; leave --loss out")
    if _SHIFT not in names:
        raise SpecError(f"loss: {code.origin.architecture} does not predict the next token; leave --loss out")
    return _OwnLoss(tuple(around), model, begin, logits)


def _returning(call: Call, loss: TensorRef) -> Call | None:
    """Return the call inside of a call that returns the loss; None where the loss is computed in the call itself."""
    return next((each for each in call.code if isinstance(each, Call) and loss in each.outputs), None)


def _logits(code: RecordedCode, variant: Variant, model: Call) -> TensorRef:
    """Follow the gradient of the loss to a tensor that the model returns, too."""
    returned = {tensor.edge: tensor for tensor in model.outputs if tensor.edge not in ("", variant.loss.edge)}
    edge = variant.loss.edge
    while edge not in returned:
        number = edge.partition("/")[0]
        node = variant.nodes.get(int(number)) if number.isdecimal() else None
        if node is None or node.name not in _NODES:
            what = "no node" if node is None else node.name
            raise SpecError(
                f"loss: that of {code.origin.architecture} is not the cross-entropy of its logits alone ({what});"
                " leave --loss out"
            )
        (edge,) = (each for each in node.edges if each)
    return returned[edge]


def _makes(instruction: Instruction, storage: str) -> bool:
    if isinstance(instruction, Call):
        return any(tensor.storage == storage for tensor in instruction.outputs)
    return isinstance(instruction, Operator) and any(str(made.number) == storage for made in instruction.makes)


def _kept(behind: tuple[Instruction, ...], found: _OwnLoss) -> Iterator[Instruction]:
    """Yield what Python drops at the end of forward, without what the loss has made."""
    loss = found.model.code[found.begin :]
    made = {str(each.number) for one in loss if isinstance(one, Operator) for each in one.makes}
    yield from (each for each in behind if isinstance(each, Drop) and each.storage not in made)


def _head(found: _OwnLoss, variant: Variant, kind: Loss) -> tuple[int, HeadWithLoss]:
    """Return the place of the head's call, and what runs instead."""
    number = found.begin - 1
    head = found.model.code[number]
    if not isinstance(head, Call) or len(head.inputs) != 1:
        raise SpecError(f"loss: the model changes its logits after the head, which {kind.value} leaves out; use liger")
    nodes = [variant.nodes[each.number] for each in head.code if isinstance(each, MakeNode)]
    weights = {edge[2:] for node in nodes for edge in node.edges if edge.startswith("p:")}
    weights |= {
        each.tensor.storage[2:] for each in head.code if isinstance(each, Save) and each.tensor.storage.startswith("p:")
    }
    has_more = any(not isinstance(each, Operator | Drop | MakeNode | Save) for each in head.code)
    has_bias = any(node.name == "AddmmBackward0" for node in nodes)  # a frozen one is no edge
    if len(weights) != 1 or has_more or has_bias:
        raise SpecError(f"loss: {kind.value} needs a linear head without bias and adapters")
    return number, HeadWithLoss(head.inputs[0], *weights)


def _with_model(around: tuple[Call, ...], model: Call) -> Call:
    """Return the outermost call with another model inside; what is between returns what the model does."""
    *outer, last = around
    code = tuple(model if isinstance(each, Call) and each.module == model.module else each for each in last.code)
    made = replace(last, code=code, outputs=model.outputs if outer else last.outputs)
    return _with_model(tuple(outer), made) if outer else made
