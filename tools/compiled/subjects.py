"""The blocks that are compiled, each in its model: the benchmark models', and transformers' of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.train.models.huggingface import batch_of, build, unpacked_sequences, with_layers
from fsdp_bench.train.models.transformer import BLOCKS, rotary_tables
from fsdp_bench.train.models.user_module import block_class, default_dtype
from tools.compiled.compile_block import Subject


def benchmark_subject(shape: ModelShape, dtype: torch.dtype, batch: int, length: int) -> Subject:
    """Return a block of a benchmark model, alone."""
    model = nn.Sequential(BLOCKS[shape.family](shape)).to(dtype).cuda()
    x = torch.zeros(batch, length, shape.hidden_size, device="cuda", dtype=dtype, requires_grad=True)
    tables = () if shape.family is Family.GPT2 else rotary_tables(length, shape.head_dim, x.device, dtype)

    def step() -> None:
        out = next(iter(model))(x, *tables)
        out.backward(torch.zeros_like(out))

    return Subject(model, model[0], step)


def huggingface_subject(config: Mapping[str, Any], dtype: torch.dtype, batch: int, length: int) -> Subject:
    """Return the block of a model with one block, between its ends, which are not compiled."""
    with default_dtype(dtype), torch.device("cuda"):
        model, _ = build(with_layers(config, 1))
    kind = block_class(model)
    given = batch_of(model, batch, length, device="cuda")

    def step() -> None:
        with unpacked_sequences():
            model(**given).loss.backward()

    return Subject(model, next(module for module in model.modules() if isinstance(module, kind)), step)
