"""Pieces of Python that the exported training scripts share: the model's config, random tokens, loss, optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model_code import why_not_replaced
from fsdp_bench.spec.setup import Loss, Offload, OptimizerKind, TrainSetup

_WIDTH = 90
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def refusal(kind: str, what: str, reason: SpecError) -> SpecError:
    """Return the error for a setting that a kind of export changes into one that cannot run or does not fit."""
    return SpecError(f"export {kind}: {what}, and {reason}; --export pytorch has the setting itself")


def config_text(config: Mapping[str, Any]) -> str:
    """Return the statement that names a model's config, as Python."""
    return f"{_SIZES_ALONE if 'rope_theta' not in config else ''}CONFIG = {literal(config)}\n"


_SIZES_ALONE = """\
# Sizes alone, which decide memory and time. What is not here, such as rope_theta, is transformers' default: to train
# the model itself, take its own config.json (AutoConfig.from_pretrained).
"""


def literal(value: Any, indent: str = "") -> str:
    """Return a value of JSON as Python, a line for each entry of a table."""
    if isinstance(value, Mapping) and value:
        entries = (f"{indent}    {_text(name)}: {literal(each, indent + '    ')},\n" for name, each in value.items())
        return "{\n" + "".join(entries) + indent + "}"
    if isinstance(value, list) and len(repr(value)) > _WIDTH:
        return "[\n" + "".join(f"{indent}    {literal(each)},\n" for each in value) + indent + "]"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def sizes_text(chosen: Chosen) -> str:
    """Return the statements that name the sizes of a step."""
    setup = chosen.setup
    return (
        f"VOCABULARY = {chosen.vocab_size}\n"
        f"BATCH = {setup.micro_batch_size}  # sequences of a GPU in one forward pass\n"
        f"LENGTH = {setup.sequence_length}  # tokens in a sequence\n"
        f"MICRO_BATCHES = {setup.gradient_accumulation_steps}  # in one optimizer step\n"
    )


TOKENS = '''
def batches(vocab_size, device):
    """Yield random tokens. Put your data here: input_ids and labels, BATCH x LENGTH; the model shifts the labels."""
    while True:
        tokens = torch.randint(vocab_size, (BATCH, LENGTH))
        yield {"input_ids": tokens.to(device), "labels": tokens.clone().to(device)}
'''

_CHUNKED = '''
def chunk_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def loss_of(logits, labels):
    """Return the mean cross-entropy, of which one chunk's fp32 logits are alive at a time."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = logits.new_zeros((), dtype=torch.float32)
    for some, wanted in zip(logits.flatten(0, 1).chunk(8), targets.chunk(8)):
        total = total + checkpoint(chunk_loss, some, wanted, use_reentrant=False, preserve_rng_state=False)
    return total / (labels.numel() - len(labels))
'''
_COMPILED = """
@torch.compile
def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def loss_of(logits, labels):
    return cross_entropy(logits, F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous())
"""
_FUSED = """
cross_entropy = {kind}()


def loss_of(logits, labels):
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
_LOSSES = {
    Loss.PLAIN: "",
    Loss.CHUNKED: _CHUNKED,
    Loss.COMPILED: _COMPILED,
    Loss.LIGER: _FUSED.format(kind="LigerCrossEntropyLoss"),
    Loss.FLASH_ATTN: _FUSED.format(kind="CrossEntropyLoss"),
}
_LOSS_IMPORTS = {
    Loss.PLAIN: (),
    Loss.CHUNKED: ("import torch.nn.functional as F", "from torch.utils.checkpoint import checkpoint"),
    Loss.COMPILED: ("import torch.nn.functional as F",),
    Loss.LIGER: ("import torch.nn.functional as F", "from liger_kernel.transformers import LigerCrossEntropyLoss"),
    Loss.FLASH_ATTN: (
        "import torch.nn.functional as F",
        "from flash_attn.losses.cross_entropy import CrossEntropyLoss",
    ),
}


def loss_imports(setup: TrainSetup) -> tuple[str, ...]:
    """Return the imports of the loss."""
    return _LOSS_IMPORTS[setup.loss]


def loss_text(setup: TrainSetup, architecture: str, config: Mapping[str, Any]) -> str:
    """Return the function that computes the loss of logits; empty where the model's own is meant.

    Raises:
        SpecError: for a loss that is not exported, or that the model does not take.
    """
    if setup.loss not in _LOSSES:
        raise SpecError(f"export: loss {setup.loss.value} is not exported; plain, chunked, compiled and liger are")
    if setup.loss is not Loss.PLAIN and (reason := why_not_replaced(setup.loss, architecture, config)) is not None:
        raise SpecError(f"export: loss: {reason}")
    return _LOSSES[setup.loss]


def forward_text(setup: TrainSetup) -> str:
    """Return the expression of a micro-batch's loss."""
    if setup.loss is Loss.PLAIN:
        return "model(**batch).loss"
    return 'loss_of(model(input_ids=batch["input_ids"]).logits, batch["labels"])'


_FLAGS = {
    OptimizerKind.ADAMW_FOREACH: "foreach=True",
    OptimizerKind.ADAMW_FUSED: "fused=True",
    OptimizerKind.ADAMW_FOR_LOOP: "foreach=False, fused=False",
}


def optimizer_text(setup: TrainSetup, parameters: str = "model.parameters()") -> str:
    """Return the expression that builds the optimizer of some parameters.

    Raises:
        SpecError: for one that is not exported.
    """
    kind, rate = setup.optimizer, f"lr={setup.learning_rate!r}"
    if setup.offload is Offload.OPTIMIZER:
        return f"CPUOffloadOptimizer({parameters}, torch.optim.AdamW, {rate}, {_FLAGS[kind]})"
    if kind in _FLAGS:
        return f"torch.optim.AdamW({parameters}, {rate}, {_FLAGS[kind]})"
    if kind is OptimizerKind.SGD:
        return f"torch.optim.SGD({parameters}, {rate}, foreach=True)"
    if kind is OptimizerKind.ADAFACTOR:
        return f"torch.optim.Adafactor({parameters}, {rate})"
    if kind is OptimizerKind.ADAMW_8BIT:
        return f"AdamW8bit({parameters}, {rate})"
    raise SpecError(f"export: optimizer {kind.value} is not exported; adamw, adamw-8bit, adafactor and sgd are")


def optimizer_imports(setup: TrainSetup) -> tuple[str, ...]:
    """Return the imports of the optimizer."""
    if setup.offload is Offload.OPTIMIZER:
        return ("from torchao.optim import CPUOffloadOptimizer",)
    return ("from torchao.optim import AdamW8bit",) if setup.optimizer is OptimizerKind.ADAMW_8BIT else ()
