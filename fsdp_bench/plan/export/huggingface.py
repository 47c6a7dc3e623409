"""train_huggingface.py: TrainingArguments and a Trainer. Read in transformers 5.23 (_process_fsdp_args, trainer.py)."""

from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File, environment, prefix, text_of, torchrun
from fsdp_bench.plan.export.pieces import base_dtype, optimizer_text, with_adapters
from fsdp_bench.plan.export.plugin import (
    PRECISION_NOTE,
    as_accelerate_shards,
    fsdp_fields,
    hybrid_sizes,
    policy_text,
    strategy_name,
)
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Offload, OptimizerKind, Reentrant, TrainSetup

KIND = "huggingface"
NAME = "train_huggingface.py"

_OPTIMIZERS = {
    OptimizerKind.ADAMW_FOREACH: "adamw_torch",
    OptimizerKind.ADAMW_FUSED: "adamw_torch_fused",
    OptimizerKind.ADAMW_8BIT: "adamw_torch_8bit",
    OptimizerKind.SGD: "sgd",
}


def arguments_and_script(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the script. Raises SpecError for what the Trainer does not have."""
    optimizer_text(chosen.setup)  # what no script has
    if (reason := _why_not(chosen.setup, chosen.lora)) is not None:
        raise SpecError(f"export {KIND}: {reason}; --export pytorch has it")
    changes: tuple[str, ...] = ()
    if not chosen.setup.is_bare:
        chosen, changes = as_accelerate_shards(chosen, KIND)
        is_mixed = policy_text(chosen.setup) is not None
        changes += (PRECISION_NOTE.replace("mixed_precision is 'no'", "bf16 is False"),) if is_mixed else ()
    notes = (*notes, *changes, *environment(chosen))
    setup, lora = chosen.setup, chosen.lora
    text = text_of(
        NAME,
        "Training with Hugging Face's Trainer",
        chosen,
        notes,
        arguments=arguments(chosen),
        sizes=hybrid_sizes(setup),
        policy=None if setup.is_bare else policy_text(setup),
        base_dtype=base_dtype(setup, lora),
        with_adapters=with_adapters(setup),
    )
    start = f"{prefix(chosen)}python {NAME}" if chosen.setup.is_bare else torchrun(chosen, NAME)
    return [File(KIND, NAME, text, start, notes)]


def _why_not(setup: TrainSetup, lora: LoRA | None) -> str | None:
    if lora is not None and lora.is_quantized:
        return "the Trainer takes 4-bit weights from a checkpoint alone, not random ones"
    if lora is not None and not setup.is_bare:
        return "adapters are not exported for the Trainer on several GPUs"
    if setup.loss is not Loss.PLAIN:
        return f"the Trainer computes the model's own loss, not {setup.loss.value}"
    if setup.optimizer not in _OPTIMIZERS:
        return f"the Trainer has no {setup.optimizer.value} as predicted; {', '.join(_OPTIMIZERS)} are"
    if setup.reentrant is Reentrant.AROUND and not setup.is_ddp:
        return "transformers has checkpointed inside of FSDP's units since 2025; use --reentrant inside"
    if setup.activation_offload:
        return "fsdp_config of the Trainer has no offload of activations"
    return _why_not_bare(setup) if setup.is_bare else None


def _why_not_bare(setup: TrainSetup) -> str | None:
    if setup.compile:
        return "the Trainer does not compile blocks alone as --compile does"
    if setup.checkpointing is Checkpointing.SELECTIVE:
        return "the Trainer has no selective checkpointing; use --checkpointing full"
    if setup.checkpointing_policy is not None:
        return "the Trainer checkpoints every block; leave out the policy"
    if setup.precision.needs_grad_scaler:
        return "the Trainer's fp16 adds fp32 copies of the logits; use bf16-mixed"
    return None


def arguments(chosen: Chosen) -> dict[str, Any]:
    """Return what TrainingArguments takes, but for the dtypes of mixed precision."""
    setup = chosen.setup
    found: dict[str, Any] = {
        "output_dir": "output",
        "per_device_train_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "learning_rate": setup.learning_rate,
        "weight_decay": 0.01,
        "max_grad_norm": setup.max_grad_norm or 0.0,
        "optim": _OPTIMIZERS[setup.optimizer],
        "bf16": False,
        "fp16": False,
        "seed": setup.seed,
        "save_strategy": "no",
        "report_to": "none",
    }
    if setup.checkpointing is Checkpointing.FULL and (setup.is_bare or setup.reentrant is not Reentrant.NO):
        reentrant = {"use_reentrant": setup.reentrant is not Reentrant.NO}
        found |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": reentrant}
    if setup.is_bare:
        return found
    found |= {"fsdp": True, "fsdp_config": _fsdp_config(chosen)}
    if setup.gradient_accumulation_steps > 1 and setup.sync_every_micro_batch:
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return found


def _fsdp_config(chosen: Chosen) -> dict[str, Any]:
    setup = chosen.setup
    found = {**fsdp_fields(chosen), "cpu_offload": setup.offload is Offload.PARAMS}
    found["transformer_layer_cls_to_wrap"] = [chosen.modules.block_class]
    if setup.api is Api.FSDP1:
        found |= {"reshard_after_forward": strategy_name(setup).lower(), "limit_all_gathers": setup.limit_all_gathers}
    return found
