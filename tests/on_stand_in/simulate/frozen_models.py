"""Small models with frozen parameters, as ``--module`` takes them."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from fsdp_bench.train.models.huggingface import batch_of, build
from tests.shapes import llama_config

CONFIG = llama_config()
WHICH = "FSDP_BENCH_TEST_FROZEN"
"""``lora``, or parts of the names of frozen parameters."""


def make(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    """Return the model that the environment names, and a batch."""
    model: nn.Module
    model, _ = build(CONFIG)
    batch = batch_of(model, micro_batch_size, sequence_length)
    which = os.environ[WHICH]
    if which == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    else:
        for name, parameter in model.named_parameters():
            if any(part in name for part in which.split()):
                parameter.requires_grad_(False)
    return model.train(), batch
