"""Expressions of Python that exported training scripts share: literals, dtypes, adapters, loss, optimizer."""

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import ALL_LINEAR, LoRA
from fsdp_bench.spec.model_code import why_not_replaced
from fsdp_bench.spec.setup import BackwardPrefetch, Loss, Offload, OptimizerKind, TrainSetup
from fsdp_bench.spec.units import format_gib

_WIDTH = 90
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def changed(chosen: Chosen, kind: str, what: str, **fields: Any) -> tuple[Chosen, str]:
    """Predict a setting with other fields; note ``what`` they are for. Raises SpecError if it does not run or fit."""
    try:
        found = chosen.with_setup(replace(chosen.setup, **fields))
    except SpecError as error:
        raise SpecError(f"export {kind}: {what}, and {error}; --export pytorch has the setting itself") from None
    was, now = (format_gib(one.prediction.needed_bytes) for one in (chosen, found))
    return found, f"{what}: {now} reserved instead of {was} (predicted)"


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


def refuse_loss(setup: TrainSetup, architecture: str, config: Mapping[str, Any]) -> None:
    """Raise SpecError for a loss that is not exported: those that are, or why the model does not take it."""
    if setup.loss not in (Loss.PLAIN, Loss.CHUNKED, Loss.COMPILED, Loss.LIGER, Loss.FLASH_ATTN):
        raise SpecError(f"export: loss {setup.loss.value} is not exported; plain, chunked, compiled and liger are")
    if setup.loss is not Loss.PLAIN and (reason := why_not_replaced(setup.loss, architecture, config)) is not None:
        raise SpecError(f"export: loss: {reason}")


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
    """Return the expression that builds the optimizer. Raises SpecError for one that is not exported."""
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


def is_mixed(setup: TrainSetup) -> bool:
    """Whether not all dtypes of the setup are the stored one."""
    precision = setup.precision
    return not precision.store == precision.compute == precision.reduce


def of_fully_shard_alone(setup: TrainSetup) -> str | None:
    """Return what a setup asks of fully_shard that libraries around it do not pass on; None if that is nothing."""
    asked = {
        "reshard_after_forward over fewer ranks": setup.reshard_after_forward is not None,
        "reshard_last_block = false": not setup.reshard_last_block,
        "fp32_head": setup.fp32_head,
        "forward_prefetch": setup.forward_prefetch,
        "backward_prefetch none": setup.backward_prefetch is BackwardPrefetch.NONE,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


# -- PEFT's adapters, as train/models/lora.py puts them in where predictions are recorded ------------------------------


def refuse_adapters(setup: TrainSetup, lora: LoRA) -> None:
    """Raise SpecError for a setup with adapters that is not exported, naming what is."""
    store = setup.precision.store
    if lora.base and store not in ("fp32", "bf16"):
        raise SpecError(f"export: adapters in {store} over frozen weights in bf16 are not exported; use bf16-mixed")
    if setup.offload is not Offload.NONE:
        raise SpecError("export: adapters with offload are not exported; leave --offload out")


def base_dtype(setup: TrainSetup, lora: LoRA | None) -> str:
    """Return the dtype in which the model is built, as Python: that of frozen weights where there are adapters."""
    return DTYPES["bf16" if lora is not None and lora.base else setup.precision.store]


def adapters(lora: LoRA) -> dict[str, Any]:
    """Return what LoraConfig is given."""
    fields: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha}
    if lora.targets:
        fields["target_modules"] = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    if lora.dropout:
        fields["lora_dropout"] = lora.dropout
    if lora.bias != "none":
        fields["bias"] = lora.bias
    if lora.modules_to_save:
        fields["modules_to_save"] = list(lora.modules_to_save)
    return fields


def with_adapters(setup: TrainSetup) -> str:
    """Return the statement that puts adapters, in the stored dtype, into ``model``; PEFT's default is fp32."""
    in_fp32 = "" if setup.precision.store == "fp32" else ", autocast_adapter_dtype=False"
    return f"model = get_peft_model(model, LoraConfig(**ADAPTERS){in_fp32})"
