"""Pieces of Python that put PEFT's adapters into a model of transformers; for QLoRA with its base in 4 bits.

As train/models/lora.py and quantized.py do it where predictions are recorded.
"""

from __future__ import annotations

from typing import Any

from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.pieces import DTYPES, literal
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import ALL_LINEAR, LoRA
from fsdp_bench.spec.setup import Offload, Reentrant, TrainSetup, Wrap

_QUANTIZE = '''
def quantize(model, device):
    """Build a model of the meta device on a GPU, its linear layers in 4 bits: one at a time is whole there."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,  # so that FSDP shards them as any other
    )
    kept = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    replace_with_bnb_linear(model, kept, config)
    for module in model.modules():  # random; or take the weights of a checkpoint here
        if isinstance(module, bnb.nn.Linear4bit):
            module.weight, module.bias = in_4_bits(module, device)
        else:
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    model.tie_weights()
    model.is_loaded_in_4bit = True  # PEFT asks
    return model


def in_4_bits(module, device):
    """Return the weight of a linear layer in 4 bits, and its bias."""
    sizes = module.in_features, module.out_features
    whole = torch.nn.Linear(*sizes, bias=module.bias is not None, dtype=torch.bfloat16, device=device)
    options = {"quant_type": "nf4", "quant_storage": torch.bfloat16, "module": module}
    return bnb.nn.Params4bit(whole.weight.data, requires_grad=False, **options).to(device), whole.bias
'''
_IS_TRAINED = '''
def is_trained(module):
    """Whether a module is a matrix of an adapter: each is a unit, as by PEFT's fsdp_auto_wrap_policy."""
    weight = None if list(module.children()) else getattr(module, "weight", None)
    return weight is not None and weight.requires_grad
'''
_TRAINED = '''
def trained(model):
    """Return the parameters of the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
'''
TRAINED = "trained(model)"
"""The parameters that an optimizer gets, where there are adapters."""
_ZEROS = (
    "for name, parameter in model.named_parameters():",
    '    if "lora_B" in name:  # adapters change nothing at first',
    "        torch.nn.init.zeros_(parameter)",
)


def refuse_adapters(setup: TrainSetup, lora: LoRA) -> None:
    """Raise for a setup with adapters that is not exported.

    Raises:
        SpecError: naming what is.
    """
    store = setup.precision.store
    if lora.base and store not in ("fp32", "bf16"):
        raise SpecError(f"export: adapters in {store} over frozen weights in bf16 are not exported; use bf16-mixed")
    if setup.offload is not Offload.NONE:
        raise SpecError("export: adapters with offload are not exported; leave --offload out")


def adapters_imports(lora: LoRA | None) -> list[str]:
    """Return the imports of what puts adapters in."""
    if lora is None:
        return []
    found = ["from peft import LoraConfig, get_peft_model"]
    if lora.is_quantized:
        found += [
            "import bitsandbytes as bnb",
            "from transformers import BitsAndBytesConfig",
            "from transformers.integrations.bitsandbytes import replace_with_bnb_linear",
            "from transformers.quantizers.base import get_keys_to_not_convert",
        ]
    return found


def adapters_functions(setup: TrainSetup, lora: LoRA | None) -> str:
    """Return the functions that the others call; empty without adapters."""
    if lora is None:
        return ""
    is_apart = setup.wrap is Wrap.BLOCK_AND_ADAPTERS
    return "\n".join([*([_QUANTIZE] if lora.is_quantized else []), *([_IS_TRAINED] if is_apart else []), _TRAINED])


def base_dtype(setup: TrainSetup, lora: LoRA | None) -> str:
    """Return the dtype in which the model is built, as Python: that of frozen weights where there are adapters."""
    return DTYPES["bf16" if lora is not None and lora.base else setup.precision.store]


def adapters_config(lora: LoRA | None) -> str:
    """Return the statement that names what LoraConfig is given; empty without adapters."""
    if lora is None:
        return ""
    fields: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha}
    if lora.targets:
        fields["target_modules"] = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    if lora.dropout:
        fields["lora_dropout"] = lora.dropout
    if lora.bias != "none":
        fields["bias"] = lora.bias
    if lora.modules_to_save:
        fields["modules_to_save"] = list(lora.modules_to_save)
    return f"ADAPTERS = {literal(fields)}\n"


def adapters_text(setup: TrainSetup) -> str:
    """Return the statement that puts adapters into ``model``. They are trained in the setup's stored dtype.

    PEFT makes adapters of a 16-bit model in fp32 unless autocast_adapter_dtype is false.
    """
    in_fp32 = "" if setup.precision.store == "fp32" else ", autocast_adapter_dtype=False"
    return f"model = get_peft_model(model, LoraConfig(**ADAPTERS){in_fp32})"


def inputs_text(setup: TrainSetup) -> list[str]:
    """Return the statement without which a reentrant checkpoint of frozen blocks has no gradient; none otherwise.

    The Trainer does so itself (PreTrainedModel.gradient_checkpointing_enable).
    """
    return (
        [] if setup.reentrant is Reentrant.NO else ["model.enable_input_require_grads()  # for reentrant checkpoints"]
    )


def zeros_text(chosen: Chosen) -> list[str]:
    """Return the statements that begin adapters that were built without data as PEFT does; none without adapters."""
    return list(_ZEROS) if chosen.lora is not None else []
