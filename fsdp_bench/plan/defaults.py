"""Defaults of all commands and Python functions, where they differ from TrainSetup's.

Precision, sequence length and GPUs per node are the same for all code. Hugging Face's code is trained as transformers'
Trainer trains it unless the user states otherwise, and every answer says what was assumed of it (``assumptions``).
Read in transformers 5.23 and accelerate 1.15.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import QUANTIZED, LoRA, parse_lora
from fsdp_bench.spec.recording.model import Model, RecordedModel, code_of, lora_of
from fsdp_bench.spec.setup import FIELDS, Api, Offload, Precision, ShardingStrategy, TrainSetup, Wrap

DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_SEQUENCE_LENGTH = 4096
USUAL_GPUS_PER_NODE = 8
"""GPUs per node if no server is named. Most servers of the catalogue have 8."""


def default_sequence_length(model: Model | None) -> int:
    """Return DEFAULT_SEQUENCE_LENGTH, or all positions of a model with fewer, in multiples its recording allows."""
    positions = model.max_position_embeddings if model is not None else None
    if positions is None:
        return DEFAULT_SEQUENCE_LENGTH
    if isinstance(model, RecordedModel):
        positions -= positions % model.code.multiple
    return min(DEFAULT_SEQUENCE_LENGTH, positions)


class Code(NamedTuple):
    """Whose code a model is, as far as defaults depend on it."""

    name: str = "benchmark"
    """``huggingface``, ``torchtitan``, ``module`` or ``benchmark``."""
    has_adapters: bool = False
    """Whether PEFT's adapters are in it."""


def trained_code(model: Model) -> Code:
    """Return whose code a model is."""
    return Code(code_of(model), lora_of(model) is not None)


def default_base(precision: Precision) -> str | None:
    """Return how LoRA's frozen weights are stored: in bf16 if they compute in it, else like the adapters.

    Checkpoints are in bf16, which from_pretrained keeps since transformers 5; PEFT then makes adapters in fp32
    (autocast_adapter_dtype).
    """
    return "bf16" if precision.compute == "bf16" else None


def read_adapters(
    lora: int | str | LoRA | None, qlora: int | str | None, precision: Precision | str | None = None
) -> LoRA | None:
    """Read PEFT's adapters: their rank, or fields by name. ``qlora``: on weights of 4 bits. None if neither is given.

    ``precision`` decides how other frozen weights are stored (``default_base``); without it, like the adapters.

    Raises SpecError, naming the field and what is allowed.
    """
    if lora is not None and qlora is not None:
        raise SpecError("lora and qlora: keep one")
    if qlora is not None:
        return parse_lora(qlora, "qlora", QUANTIZED)
    if lora is None or isinstance(lora, LoRA):
        return lora
    stored = Precision.parse(precision) if isinstance(precision, str) else precision
    return parse_lora(lora, "lora", default_base=default_base(stored) if stored is not None else None)


def trainer_defaults(code: Code, stated: Mapping[str, Any], world_size: int | None) -> dict[str, Any]:
    """Return the fields of TrainSetup that transformers' Trainer decides for Hugging Face's code; none for other code.

    - fsdp2: TrainingArguments._process_fsdp_args takes version 2 of ``fsdp_config``, and warns that 1 is deprecated.
    - Gradients are reduced in the last micro-batch alone: Trainer._run_epoch enters Accelerator.no_sync in all others,
      which calls FSDPModule.set_requires_gradient_sync(False) or FullyShardedDataParallel.no_sync.
    - One GPU has no FSDP: a script that is started without torchrun has no process group, and then
      PartialState.distributed_type is NO, with which Accelerator.prepare_model wraps nothing.
    - Under fsdp1 each matrix of an adapter is a unit: Trainer._prepare_for_training calls update_fsdp_plugin_peft.

    Args:
        code: whose code.
        stated: fields that the user states, text or values; they are not in the answer.
        world_size: the number of GPUs; None if that is searched.
    """
    if code.name != "huggingface":
        return {}
    found: dict[str, Any] = {"api": Api.FSDP2}
    if world_size is None or stated.get("gradient_accumulation_steps", 1) != 1:
        found["sync_every_micro_batch"] = False
    is_fsdp2 = Api(stated.get("api", Api.FSDP2)) is Api.FSDP2
    if code.has_adapters and not is_fsdp2:
        found["wrap"] = Wrap.BLOCK_AND_ADAPTERS
    has_fsdp = any(stated.get(name) is not None for name, one in FIELDS.items() if one.needs_fsdp)
    has_fsdp |= Offload(stated.get("offload", Offload.NONE)) is not Offload.NONE
    if world_size == 1 and is_fsdp2 and not has_fsdp:
        found["strategy"] = ShardingStrategy.NO_SHARD
    return {name: value for name, value in found.items() if name not in stated}


def assumptions(model: Model, setup: TrainSetup) -> tuple[str, ...]:
    """Return what an answer assumes as transformers' Trainer does it, each with the option that says otherwise."""
    if code_of(model) != "huggingface":
        return ()
    lora = lora_of(model)
    found = ["frozen weights in bf16 (or base=same in --lora)"] if lora is not None and lora.base == "bf16" else []
    if setup.is_bare:
        return (*found, "no FSDP on one GPU (or --strategy FULL_SHARD)")
    if setup.api is Api.FSDP2:
        found.insert(0, "fsdp2 (or --api fsdp1)")
    elif setup.wrap is Wrap.BLOCK_AND_ADAPTERS:
        found.append("units of adapters (or --wrap block)")
    steps = setup.gradient_accumulation_steps
    if steps > 1 and not setup.sync_every_micro_batch and setup.world_size > 1:
        found.append(
            f"gradients stay unsharded until the last of {steps} micro-batches reduces them"
            " (or --sync-every-micro-batch)"
        )
    return tuple(found)
