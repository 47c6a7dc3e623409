"""train_huggingface.py: TrainingArguments with fsdp_config, and a Trainer that they start.

Read in transformers 5.23: training_args.py, _process_fsdp_args; trainer.py, create_accelerator_and_postprocess.
"""

from __future__ import annotations

from typing import Any

from fsdp_bench.plan.export.adapters import adapters_config, adapters_imports, adapters_text, base_dtype
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import File
from fsdp_bench.plan.export.header import header
from fsdp_bench.plan.export.launch import environment, prefix, torchrun
from fsdp_bench.plan.export.pieces import config_text, literal, sizes_text
from fsdp_bench.plan.export.plugin import (
    PRECISION_NOTE,
    as_accelerate_shards,
    hybrid_sizes,
    policy_text,
    reshards,
    strategy_name,
)
from fsdp_bench.plan.export.sharding import autocast_text
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    Reentrant,
    TrainSetup,
)

KIND = "huggingface"
NAME = "train_huggingface.py"

_OPTIMIZERS = {
    OptimizerKind.ADAMW_FOREACH: "adamw_torch",
    OptimizerKind.ADAMW_FUSED: "adamw_torch_fused",
    OptimizerKind.ADAMW_8BIT: "adamw_torch_8bit",
    OptimizerKind.SGD: "sgd",
}


def arguments_and_script(chosen: Chosen, notes: tuple[str, ...]) -> list[File]:
    """Return the script.

    Raises:
        SpecError: for what the Trainer does not have.
    """
    if (reason := _why_not(chosen.setup, chosen.lora)) is not None:
        raise SpecError(f"export {KIND}: {reason}; --export pytorch has it")
    changes: tuple[str, ...] = ()
    if not chosen.setup.is_bare:
        chosen, changes = as_accelerate_shards(chosen, KIND)
        is_mixed = policy_text(chosen.setup) is not None
        changes += (PRECISION_NOTE.replace("mixed_precision is 'no'", "bf16 is False"),) if is_mixed else ()
    notes = (*notes, *changes, *environment(chosen))
    text = (
        header("Training with Hugging Face's Trainer", chosen, notes)
        + _imports(chosen.setup, adapters_imports(chosen.setup, chosen.lora))
        + "\n"
        + config_text(chosen.config)
        + adapters_config(chosen.lora)
        + sizes_text(chosen)
        + 'STEPS = int(os.environ.get("STEPS", "20"))\n'
        + f"ARGUMENTS = {literal(arguments(chosen))}\n"
        + _main(chosen.setup, chosen.lora)
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
    """Return why the Trainer cannot train a setting on one GPU without FSDP."""
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
    found: dict[str, Any] = {
        "version": 1 if setup.api is Api.FSDP1 else 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [chosen.modules.block_class],
        "activation_checkpointing": setup.checkpointing is Checkpointing.FULL and setup.reentrant is Reentrant.NO,
        "cpu_offload": setup.offload is Offload.PARAMS,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if setup.api is Api.FSDP2:
        return found | {"reshard_after_forward": reshards(setup)}
    prefetch = setup.backward_prefetch
    return found | {
        "reshard_after_forward": strategy_name(setup).lower(),
        "backward_prefetch": "NO_PREFETCH" if prefetch is BackwardPrefetch.NONE else prefetch.value,
        "forward_prefetch": setup.forward_prefetch,
        "limit_all_gathers": setup.limit_all_gathers,
        "use_orig_params": setup.use_orig_params,
        "sync_module_states": False,
    }


def _imports(setup: TrainSetup, of_adapters: list[str]) -> str:
    found = [
        *of_adapters,
        "from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments",
    ]
    if not setup.is_bare and (policy := policy_text(setup)) is not None:
        found.insert(0, f"from torch.distributed.fsdp import {policy.partition('(')[0]}")
    if hybrid_sizes(setup) is not None:
        found.insert(0, "from accelerate.parallelism_config import ParallelismConfig")
    return "\n".join(["import os", "", "import torch", *sorted(found)]) + "\n"


def _main(setup: TrainSetup, lora: LoRA | None) -> str:
    lines = ["arguments = TrainingArguments(**ARGUMENTS, max_steps=STEPS, logging_steps=1)"]
    if (sizes := hybrid_sizes(setup)) is not None:
        mesh = f"ParallelismConfig(dp_replicate_size={sizes[0]}, dp_shard_size={sizes[1]})"
        lines[0] = lines[0].replace("max_steps", f"parallelism_config={mesh}, max_steps")
    if not setup.is_bare and (policy := policy_text(setup)) is not None:
        lines.append(f"precision = {policy}")
        lines.append('arguments.fsdp_plugin_args["mixed_precision_policy"] = precision  # what bf16=True would not do')
    body = "".join(f"    {line}\n" for line in lines)
    adapters = "" if lora is None else f"    {adapters_text(setup)}\n"
    autocast = autocast_text(setup, '"cuda"') if setup.is_bare else []
    around = "".join(f"    {line}  # bf16=True would add fp32 logits\n" for line in autocast)
    return f'''

class RandomTokens(torch.utils.data.Dataset):
    """Random tokens. Put your data here: input_ids and labels of LENGTH tokens; the model shifts the labels."""

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (LENGTH,))
        return {{"input_ids": tokens, "labels": tokens}}


def main():
{body}    config = AutoConfig.for_model(**CONFIG)
    torch.manual_seed({setup.seed})  # the same weights on every rank
    model = AutoModelForCausalLM.from_config(config, dtype={base_dtype(setup, lora)})
{adapters}{around}    Trainer(model, arguments, train_dataset=RandomTokens()).train()


if __name__ == "__main__":
    main()
'''
