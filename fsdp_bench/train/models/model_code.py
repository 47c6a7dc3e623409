"""Builds a trial's model from Hugging Face's code or a user's function, with data, its batches, and another loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model_code import ModelCode, why_not_replaced
from fsdp_bench.spec.setup import Loss, TrainSetup
from fsdp_bench.train.models.dtypes import DTYPES
from fsdp_bench.train.models.huggingface import batch_of, build, largest_integers
from fsdp_bench.train.models.lora import keeps_its_dtype, with_frozen_base
from fsdp_bench.train.models.loss import IGNORED, chunked, head_loss, loss_function
from fsdp_bench.train.models.quantized import materialize_states
from fsdp_bench.train.models.transformer import initialize
from fsdp_bench.train.models.user_module import (
    allocate_parameters,
    block_class,
    call_users_function,
    default_dtype,
    loss_of,
)


def build_code(
    code: ModelCode, setup: TrainSetup, rank: int, num_steps: int, device: torch.device, without_data: bool = False
) -> tuple[nn.Module, type[nn.Module] | None, Iterator[list[Any]]]:
    """Build a model alike on every rank; return it, its blocks' class, and each step's micro-batches, on the host.

    ``without_data`` leaves parameters of Hugging Face's models as the memory was. Raises MachineError without
    transformers, SpecError, one line, if the code fails.
    """
    dtype = DTYPES[setup.precision.store]
    torch.manual_seed(setup.seed)
    if code.config is not None:
        fill = None if without_data else partial(initialize, seed=setup.seed)
        with _parameters_on_meta(), default_dtype(dtype):
            model, _ = build(code.config) if code.lora is None else with_frozen_base(code.config, code.lora)
        allocate_parameters(model, dtype, torch.device("cpu"), fill, keeps_its_dtype)
        if code.lora is not None and code.lora.is_quantized:
            materialize_states(model, device, with_values=not without_data)
        return model, block_class(model), _batches(model, setup, rank, num_steps)
    user = call_users_function(code.user_module(setup), setup, dtype)
    for parameter in user.model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to("cpu", dtype)
    batches = iter([[user.batch] * setup.gradient_accumulation_steps] * num_steps)
    return user.model, user.block or block_of(user.model), batches


def block_of(model: nn.Module) -> type[nn.Module] | None:
    """Return the class of a model's blocks; None if it holds no list of modules."""
    try:
        return block_class(model)
    except SpecError:
        return None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers on the meta device. Buffers get data, which code computes."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:  # one that is there already is tied
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


def _batches(model: nn.Module, setup: TrainSetup, rank: int, num_steps: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield random micro-batches. A step's samples on all ranks are the same for every world size."""
    sample, largest = batch_of(model, 1, setup.sequence_length), largest_integers(model)

    def draw(number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(setup.seed * 1_000_003 + number)
        return {name: _random(tensor, largest[name], generator) for name, tensor in sample.items()}

    per_step = setup.micro_batch_size * setup.gradient_accumulation_steps
    for step in range(num_steps):
        first = step * per_step * setup.world_size + rank
        samples = [draw(first + index * setup.world_size) for index in range(per_step)]
        yield [
            {name: torch.cat([one[name] for one in samples[begin : begin + setup.micro_batch_size]]) for name in sample}
            for begin in range(0, per_step, setup.micro_batch_size)
        ]


def _random(like: Tensor, largest: int, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.empty_like(like).normal_(generator=generator)
    return torch.randint(largest, like.shape, generator=generator)


LossOfBatch = Callable[[Any, Any], Tensor]
"""Takes a model's output and the batch."""


def next_tokens(labels_BS: Tensor) -> Tensor:
    """Return the target of each token, B, S: the label behind it, and none for the last one.

    As in transformers' ForCausalLMLoss and in Liger's LigerForCausalLMLoss: all B*S logits are used.
    """
    return F.pad(labels_BS, (0, 1), value=IGNORED)[..., 1:].contiguous()


def replace_loss(model: Any, kind: Loss) -> LossOfBatch:
    """Let a causal language model's forward leave out its own loss; return the function that computes another kind.

    The forward still takes the tokens and the labels of a batch. It returns its output with logits, and the loss is
    computed on them afterwards. For a kind that includes the head it returns the loss: the base model's hidden states
    and the head's weight are read inside of the root's forward, in which wrappers have gathered that weight.

    Raises:
        SpecError: for a model whose own loss is another one.
        MachineError: if the package that has the loss is not installed.
    """
    if hasattr(model, "get_base_model"):  # PEFT's model calls that one's forward
        model = model.get_base_model()
    config = model.config.get_text_config()
    if (reason := why_not_replaced(kind, type(model).__name__, config.to_dict())) is not None:
        raise SpecError(f"loss: {reason}")
    if (with_head := head_loss(kind)) is not None:
        base = _base_name(model)

        def forward_to_loss(input_ids: Tensor, labels: Tensor, **_absent: Any) -> Tensor:
            hidden_BSD = getattr(model, base)(input_ids=input_ids)[0]
            weight_VD = model.get_output_embeddings().weight
            return with_head(weight_VD, hidden_BSD.flatten(0, 1), next_tokens(labels).flatten())

        model.forward = forward_to_loss
        return loss_of
    forward, compute = model.forward, loss_function(kind)

    def forward_to_logits(input_ids: Tensor, labels: Tensor, **_absent: Any) -> Any:
        return forward(input_ids=input_ids)  # PEFT names every argument

    def loss_on_logits(output: Any, batch: Any) -> Tensor:
        targets_BS = next_tokens(batch["labels"])
        if kind is not Loss.CHUNKED:
            return compute(output.logits, targets_BS)
        batch_size, length = targets_BS.shape
        return chunked(output.logits, targets_BS, num_targets=batch_size * (length - 1))

    model.forward = forward_to_logits
    return loss_on_logits


def _base_name(model: Any) -> str:
    """Return the name of what is below the head: the one other child."""
    head = model.get_output_embeddings()
    names = [name for name, child in model.named_children() if child is not head]
    is_linear = isinstance(head, nn.Linear) and head.bias is None
    if len(names) != 1 or not is_linear:
        raise SpecError(f"loss: {type(model).__name__} is not a base model and a linear head without bias")
    return names[0]
