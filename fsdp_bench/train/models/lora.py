"""Puts PEFT's adapters into a Hugging Face model, on tensors without data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_bench.spec.errors import MachineError, SpecError, install_hint
from fsdp_bench.spec.lora import ALL_LINEAR, LoRA
from fsdp_bench.train.models.huggingface import build
from fsdp_bench.train.models.quantized import PACKED, materialize_states, quantize
from fsdp_bench.train.models.user_module import allocate, default_dtype

_KEPT = "_fsdp_bench_keeps_its_dtype"


def adapted(config: Mapping[str, Any], lora: LoRA, states_on: torch.device | None = None) -> tuple[nn.Module, str]:
    """Return a model with adapters on the current device, and the name of its class.

    ``states_on``, by default there, takes the states that quantized weights are read with. It is built on the meta
    device: PEFT moves adapters to their layers, and a FakeTensorMode's tensors cannot be moved (nn.Module._apply).

    Raises MachineError if a package is missing, SpecError for what transformers or PEFT refuses.
    """
    home, trained = torch.empty(0).device, torch.get_default_dtype()
    with _disable_current_modes(), torch.device("meta"):
        model, name = with_frozen_base(config, lora)
    allocate(model, trained, home, keeps_its_dtype)
    if lora.is_quantized:
        materialize_states(model, states_on or home)
    return model, name


def with_frozen_base(config: Mapping[str, Any], lora: LoRA) -> tuple[nn.Module, str]:
    """Return a model with adapters, all on the meta device, and the name of its class. Raises as ``adapted``.

    Frozen parameters that LoRA.base stores in a dtype of their own are marked (``keeps_its_dtype``).
    """
    with default_dtype(torch.bfloat16 if lora.base else torch.get_default_dtype()):
        model, name = build(config)
        if lora.is_quantized:
            quantize(model)
    model = with_lora(model, lora)
    for parameter in model.parameters():
        if lora.base and not parameter.requires_grad:
            setattr(parameter, _KEPT, True)
    return model, name


def load(
    config: Mapping[str, Any], lora: LoRA | None, dtype: torch.dtype, states_on: torch.device | None = None
) -> nn.Module:
    """Return a model stored in one dtype, but for LoRA.base. Raises MachineError, SpecError as ``adapted``."""
    with default_dtype(dtype):
        model, _ = adapted(config, lora, states_on) if lora is not None else build(config)
    return model.train()


def keeps_its_dtype(parameter: torch.Tensor) -> bool:
    """Whether a parameter is stored in a dtype of its own, which no wrapper is told to change."""
    return bool(getattr(parameter, _KEPT, False))


def stored_apart(parameter: torch.Tensor) -> tuple[str, int]:
    """Return the dtype of a parameter that keeps its own, else nothing, and how many numbers an element holds."""
    if not keeps_its_dtype(parameter):
        return "", 1
    return "bf16", PACKED if hasattr(parameter, "quant_state") else 1


def with_lora(model: nn.Module, lora: LoRA) -> nn.Module:
    """Return a model, frozen, with PEFT's trained adapters.

    Raises MachineError without PEFT, SpecError for what it refuses, as an unknown target.
    """
    try:
        import peft
    except ImportError:
        raise MachineError(f"LoRA needs PEFT: {install_hint('hf')}") from None
    try:
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets) or None,
            lora_dropout=lora.dropout,
            bias=lora.bias,
            modules_to_save=list(lora.modules_to_save) or None,
        )
        adapted_model: nn.Module = peft.get_peft_model(model, config)
    except (ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        raise SpecError(f"lora: PEFT refuses it: {' '.join(str(error).split())[:300]}") from error
    return adapted_model
