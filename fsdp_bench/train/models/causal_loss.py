"""The losses of loss.py for Hugging Face's causal language models, which then do not compute their own.

The model's forward still takes the tokens and the labels of a batch. It returns its output with logits, and the loss is
computed on them afterwards. For a kind that includes the head it returns the loss: the base model's hidden states and
the head's weight are read inside of the root's forward, in which wrappers have gathered that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model_code import why_not_replaced
from fsdp_bench.spec.setup import Loss
from fsdp_bench.train.models.loss import IGNORED, HeadLoss, chunked, head_loss, loss_function
from fsdp_bench.train.models.user_module import loss_of

LossOfBatch = Callable[[Any, Any], Tensor]
"""Takes a model's output and the batch."""


def next_tokens(labels_BS: Tensor) -> Tensor:
    """Return the target of each token, B, S: the label behind it, and none for the last one.

    As in transformers' ForCausalLMLoss and in Liger's LigerForCausalLMLoss: all B*S logits are used.
    """
    return F.pad(labels_BS, (0, 1), value=IGNORED)[..., 1:].contiguous()


def replace_loss(model: Any, kind: Loss) -> LossOfBatch:
    """Let a model's forward leave out its own loss; return the function that computes one of another kind.

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
        model.forward = partial(_forward_to_loss, model, _base_name(model), with_head)
        return loss_of
    model.forward = partial(_forward_to_logits, model.forward)
    return partial(_loss_on_logits, kind, loss_function(kind))


def _base_name(model: Any) -> str:
    """Return the name of what is below the head: the one other child."""
    head = model.get_output_embeddings()
    names = [name for name, child in model.named_children() if child is not head]
    is_linear = isinstance(head, nn.Linear) and head.bias is None
    if len(names) != 1 or not is_linear:
        raise SpecError(f"loss: {type(model).__name__} is not a base model and a linear head without bias")
    return names[0]


def _forward_to_logits(forward: Callable[..., Any], input_ids: Tensor, labels: Tensor, **_absent: Any) -> Any:
    """Call a model's forward without labels; PEFT names every argument."""
    return forward(input_ids=input_ids)


def _forward_to_loss(
    model: Any, base: str, loss: HeadLoss, input_ids: Tensor, labels: Tensor, **_absent: Any
) -> Tensor:
    hidden_BSD = getattr(model, base)(input_ids=input_ids)[0]
    weight_VD = model.get_output_embeddings().weight
    return loss(weight_VD, hidden_BSD.flatten(0, 1), next_tokens(labels).flatten())


def _loss_on_logits(kind: Loss, loss: Callable[..., Tensor], output: Any, batch: Any) -> Tensor:
    targets_BS = next_tokens(batch["labels"])
    if kind is Loss.CHUNKED:
        batch_size, length = targets_BS.shape
        return chunked(output.logits, targets_BS, num_targets=batch_size * (length - 1))
    return loss(output.logits, targets_BS)
