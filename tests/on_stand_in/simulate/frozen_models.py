"""A small model with frozen parameters, as ``--module`` takes it."""

import os
from typing import Any

from torch import nn

from fsdp_bench.train.models.huggingface import batch_of, build
from tests.shapes import llama_config

CONFIG = llama_config()
FROZEN = "FSDP_BENCH_TEST_FROZEN"
"""Parts of the names of frozen parameters."""


def make(micro_batch_size: int, sequence_length: int) -> tuple[nn.Module, Any]:
    """Return the model that the environment names, and a batch."""
    model, _ = build(CONFIG)
    batch = batch_of(model, micro_batch_size, sequence_length)
    for name, parameter in model.named_parameters():
        if any(part in name for part in os.environ[FROZEN].split()):
            parameter.requires_grad_(False)
    return model.train(), batch
