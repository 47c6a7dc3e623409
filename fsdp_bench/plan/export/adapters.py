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
def quantize(model{given}):
    """{what}"""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,  # so that FSDP shards them as any other
    )
    kept = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    replace_with_bnb_linear(model, kept, config)
{layers}    model.is_loaded_in_4bit = True  # PEFT asks
    return model


def in_4_bits(module, device):
    """Return the weight of a linear layer in 4 bits, and its bias."""
    sizes = module.in_features, module.out_features
    whole = torch.nn.Linear(*sizes, bias=module.bias is not None, dtype=torch.bfloat16, device=device)
    options = {"quant_type": "nf4", "quant_storage": torch.bfloat16, "module": module}
    return bnb.nn.Params4bit(whole.weight.data, requires_grad=False, **options).to(device), whole.bias
'''
_ONE_AT_A_TIME = "Build a model of the meta device on a GPU, its linear layers in 4 bits: one at a time is whole there."
_WHOLE = """\
    for module in model.modules():  # random; or take the weights of a checkpoint here
        if isinstance(module, bnb.nn.Linear4bit):
            module.weight, module.bias = in_4_bits(module, device)
        else:
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    model.tie_weights()
"""
_WITHOUT_DATA = """\
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            packed = torch.empty(module.weight.numel() // 4, 1, dtype=torch.bfloat16)  # four numbers in an element
            options = {"quant_type": "nf4", "quant_storage": torch.bfloat16, "bnb_quantized": True}
            module.weight = bnb.nn.Params4bit(packed, requires_grad=False, **options)
            module.bias = None if module.bias is None else torch.nn.Parameter(module.bias.to(torch.bfloat16))
"""
_FILL = '''
@torch.no_grad()
def fill(model, device):
    """Quantize one layer at a time and keep this rank's shard of it; what unpacks it is whole on every rank."""
    torch.manual_seed(0)  # every rank draws the same
    for module in model.modules():  # random; or take the weights of a checkpoint here
        if isinstance(module, bnb.nn.Linear4bit):
            whole, _ = in_4_bits(module, device)
            weight = module.weight
            shard = distribute_tensor(whole.data, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.to_local().copy_(shard.to_local())
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


def adapters_imports(setup: TrainSetup, lora: LoRA | None) -> list[str]:
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
    if is_filled_in_4_bits(setup, lora):
        found.append("from torch.distributed.tensor import distribute_tensor")
    return found


def adapters_functions(setup: TrainSetup, lora: LoRA | None) -> str:
    """Return the functions that the others call; empty without adapters."""
    if lora is None:
        return ""
    is_apart = setup.wrap is Wrap.BLOCK_AND_ADAPTERS
    quantize = _quantize_text(is_filled_in_4_bits(setup, lora)) if lora.is_quantized else []
    return "\n".join([*quantize, *([_IS_TRAINED] if is_apart else []), _TRAINED])


def is_filled_in_4_bits(setup: TrainSetup, lora: LoRA | None) -> bool:
    """Whether layers are quantized once the model is sharded, under fsdp2. Before, a GPU holds all of it in 4 bits.

    What that leaves in the caching allocator cannot be emptied: a rank's shards, and what unpacks the weights, lie in
    the segments of the whole layers.
    """
    return lora is not None and lora.is_quantized and setup.uses_fully_shard


def _quantize_text(is_later: bool) -> list[str]:
    what = "Make the linear layers ones in 4 bits, still without data." if is_later else _ONE_AT_A_TIME
    text = _QUANTIZE.replace("{given}", "" if is_later else ", device").replace("{what}", what)
    text = text.replace("{layers}", _WITHOUT_DATA if is_later else _WHOLE)
    return [text, _FILL] if is_later else [text]


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
