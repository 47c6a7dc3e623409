"""Records one training step of one model at one point: one compute dtype, batch size and sequence length."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.variants import VariantKind
from fsdp_bench.train.models.lora import keeps_its_dtype
from fsdp_bench.train.models.quantized import quantization_tensors
from fsdp_bench.train.models.user_module import CONTRACT, allocate_parameters, call_model
from fsdp_bench.train.recording.backward import RawNode, record_backward
from fsdp_bench.train.recording.formulas import Size
from fsdp_bench.train.recording.forward import Code, Recorder, calls_logged, described, nested
from fsdp_bench.train.wrapping.units import trained_leaves


class RawStep(NamedTuple):
    """One step at one point, as lists; sizes are Size."""

    top: Code
    nodes: dict[int, RawNode]
    loss: Code
    buffers: list[tuple[str, Size]]
    """The module that has each, and its bytes."""


def record_step(
    model: nn.Module,
    batch: Any,
    dtype: torch.dtype,
    kind: VariantKind,
    device: torch.device,
    block: type[nn.Module],
    compute_loss: Callable[[Any, Any], torch.Tensor],
) -> tuple[RawStep, list[str]]:
    """Run forward and backward of a bare model once, without data; return the step, and what is not known of it.

    Parameters are in fp32 on the fake accelerator; ``dtype`` is the compute dtype. Raises SpecError if that fails.
    """
    if not kind.autocast:
        allocate_parameters(model, dtype, device, keeps=keeps_its_dtype)  # as wrappers show them while gathered
        batch = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch)
    names = {parameter: name for name, parameter in model.named_parameters()}
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)  # the width of logits, where it is known
    recorder = Recorder(device, vocabulary if isinstance(vocabulary, int) else None, kind.is_offloaded)
    for parameter, name in names.items():
        recorder.name(parameter, ["p", name])
    buffers = _name_buffers(recorder, model)
    for index, leaf in enumerate(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)):
        recorder.name(leaf, ["i", index])
    context: Any = torch.autocast(device.type, dtype) if kind.autocast or kind.is_apart else nullcontext()
    if kind.is_apart and not kind.shows_gathered:
        _show_as_stored(trained_leaves(model))
    if kind.casts_at_blocks:
        _cast_inputs(model, block, dtype)
    with calls_logged(recorder, model, names, block), recorder.forward(), _data_dependence_explained():
        with context:
            output = call_model(model, batch)
        loss = compute_loss(output, batch)
    if loss.grad_fn is None:
        raise SpecError(f"module: its loss needs no gradient, so there is nothing to train; {CONTRACT}")
    log, recorder.log = recorder.log, []
    del output  # held until the loss is divided by the number of micro-batches, as in module_step
    (described_loss,) = described(recorder, loss, names)
    nodes, notes = record_backward(recorder, loss, names)
    top = nested(log, nodes, recorder.opened_by)
    return RawStep(top, dict(sorted(nodes.items())), described_loss, buffers), notes


def _cast_inputs(model: nn.Module, block: type[nn.Module], dtype: torch.dtype) -> None:
    """FSDPState._pre_forward, cast_forward_inputs: before a unit is gathered, and so in its caller."""

    def cast(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

    for module in model.modules():
        if isinstance(module, block):
            module.register_forward_pre_hook(cast, with_kwargs=True)


def _show_as_stored(leaves: list[nn.Module]) -> None:
    """Let modules show their parameters in fp32, as sharded ones, but while they run."""
    for leaf in leaves:
        shown = dict(leaf._parameters)
        stored = {
            name: p if p is None else nn.Parameter(torch.empty_like(p, dtype=torch.float32), p.requires_grad)
            for name, p in shown.items()
        }
        leaf._parameters.update(stored)
        leaf.register_forward_pre_hook(lambda module, _args, shown=shown: module._parameters.update(shown))
        leaf.register_forward_hook(lambda module, _args, _out, stored=stored: module._parameters.update(stored))


def _name_buffers(recorder: Recorder, model: nn.Module) -> list[tuple[str, Size]]:
    """Name buffers, and the tensors that are needed to read quantized weights."""
    found: list[tuple[str, Size]] = []
    for name, buffer in (*model.named_buffers(), *quantization_tensors(model)):
        if buffer.untyped_storage()._cdata not in recorder.known:
            recorder.name(buffer, ["b", len(found)])
            found.append((name.rpartition(".")[0], Size.of_storage(buffer)))
    return found


@contextmanager
def _data_dependence_explained() -> Iterator[None]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise SpecError(
            f"the model's sizes, or the operators that it runs, depend on data ({error.func}), so it cannot be"
            " recorded; rehearse a training script of it, or measure it with a sweep"
        ) from None
