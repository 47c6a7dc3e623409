"""Cells drawn at random, with a fixed seed, from everything that the model claims: what ``validate`` compares."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
    impossible,
)

PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true", "bf16/bf16/fp32")
WORLDS = (1, 2, 3, 8, 64)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One model and one setup."""

    model: ModelShape
    setup: TrainSetup

    @property
    def label(self) -> str:
        """The cell in one line."""
        setup = self.setup
        words = [self.model.family.value, f"{self.model.num_hidden_layers} x {self.model.hidden_size}"]
        words += [setup.api.value, setup.strategy.value, f"world {setup.world_size}", str(setup.precision)]
        words += [f"checkpointing {setup.checkpointing.value}", setup.optimizer.value]
        words += [f"batch {setup.micro_batch_size} x {setup.sequence_length}", f"wrap {setup.wrap.value}"]
        if setup.gradient_accumulation_steps > 1:
            words.append(f"accumulate {setup.gradient_accumulation_steps}")
        if setup.offload is Offload.PARAMS:
            words.append("offload")
        return ", ".join(words)


def draw_cells(count: int, seed: int, device: str = "cpu") -> tuple[Cell, ...]:
    """Return ``count`` different cells that can run on ``device`` (``cpu`` or ``cuda``)."""
    source = random.Random(seed)
    cells: dict[Cell, None] = {}
    while len(cells) < count:
        try:
            cell = Cell(model=_shape(source), setup=_setup(source))
        except SpecError:
            continue  # two drawn values contradict each other
        if impossible(cell.setup, device) is None and not _is_left_out(cell, device):
            cells[cell] = None
    return tuple(cells)


def _is_left_out(cell: Cell, device: str) -> bool:
    """Leave out what the model does not claim, or what torch itself cannot run.

    Selective checkpointing of a block with FSDP units inside: it counts FSDP's profiler marks as operators of the
    block and may not find them again (torch 2.13: "invocation index ... not found in storage"). Heads in fp32 that
    CUDA's fused attention does not take: see predict/attention.py. A single padded head before a bias: torch then
    multiplies and adds in two operators, which the model does not know (an error of less than 1 %).
    """
    setup, shape = cell.setup, cell.model
    if device == "cuda" and shape.num_attention_heads == 1 and shape.head_dim % 8 and shape.family is Family.GPT2:
        return True
    if setup.wrap is Wrap.SIZE and setup.checkpointing is Checkpointing.SELECTIVE:
        return True
    return device == "cuda" and setup.precision.compute == "fp32" and shape.head_dim % 4 != 0


def _shape(source: random.Random) -> ModelShape:
    """1 to 12 layers; odd and even sizes; grouped keys or not; vocabularies of 1k to 128k."""
    family = source.choice(list(Family))
    heads = source.choice((1, 2, 3, 4, 6, 8))
    head_dim = source.choice((15, 16, 21, 32, 64) if family is Family.GPT2 else (16, 22, 32, 64))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return ModelShape(
        name="drawn",
        family=family,
        num_hidden_layers=source.randint(1, 12),
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads if family is Family.GPT2 else source.choice(divisors),
        intermediate_size=source.randint(32, 1200),
        vocab_size=source.choice((1000, 1001, 8191, 32000, 50257, 128256)),
        max_position_embeddings=8192,
        tie_word_embeddings=source.random() < 0.5,
    )


def _setup(source: random.Random) -> TrainSetup:
    api = source.choice(list(Api))
    fsdp1: dict[str, Any] = {}
    if api is Api.FSDP1:
        fsdp1 = {"use_orig_params": source.random() < 0.7, "limit_all_gathers": source.random() < 0.7}
    return TrainSetup(
        strategy=source.choice(list(ShardingStrategy)),
        api=api,
        precision=Precision.parse(source.choice(PRECISIONS)),
        offload=source.choice((Offload.NONE, Offload.NONE, Offload.PARAMS)),
        checkpointing=source.choice(list(Checkpointing)),
        optimizer=source.choice(list(OptimizerKind)),
        world_size=source.choice(WORLDS),
        micro_batch_size=source.randint(1, 4),
        sequence_length=source.choice((128, 200, 512, 1024, 2048, 4096, 8192)),
        gradient_accumulation_steps=source.choice((1, 1, 1, 2, 3, 4)),
        sync_every_micro_batch=source.random() < 0.5,
        max_grad_norm=source.choice((None, 1.0)),
        loss=source.choice((Loss.PLAIN, Loss.PLAIN, Loss.CHUNKED)),
        wrap=source.choice((Wrap.BLOCK, Wrap.BLOCK, Wrap.BLOCK, Wrap.SIZE, Wrap.NONE)),
        min_num_params=source.choice((3000, 20000, 100000)),
        backward_prefetch=source.choice(list(BackwardPrefetch)),
        forward_prefetch=source.random() < 0.25,
        **fsdp1,
    )
