"""Draws setups whose blocks are compiled: sizes of real models with few layers, on CUDA."""

from __future__ import annotations

import random

from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup, Wrap
from fsdp_bench.validate.random_setups import Cell

_PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "bf16-true")
_WORLDS = (2, 4, 8, 16, 64, 128, 512)
_CHECKPOINTING = (
    (Checkpointing.NONE, None),
    (Checkpointing.FULL, None),
    (Checkpointing.FULL, "every-2-blocks"),
    (Checkpointing.SELECTIVE, None),
    (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT),
)


def draw_compiled_cells(count: int, seed: int) -> tuple[Cell, ...]:
    """Return ``count`` different cells that compile and whose compiled blocks are predicted."""
    source = random.Random(seed)
    cells: dict[Cell, None] = {}
    while len(cells) < count:
        try:
            shape, setup = _shape(source), _setup(source)
        except SpecError:
            continue  # two drawn values contradict each other
        if why_impossible(shape, setup, "cuda") is None and why_eager(shape, setup, CUDA) is None:
            cells[Cell(model=shape, setup=setup)] = None
    return tuple(cells)


def _shape(source: random.Random) -> ModelShape:
    family = source.choice((Family.LLAMA, Family.LLAMA, Family.GPT2))
    heads, head_dim = source.choice((4, 8, 12, 16, 20, 24, 32, 40)), source.choice((64, 64, 80, 96, 128))
    groups = [n for n in (1, 2, 4, 5, 8) if heads % n == 0]
    width = heads * head_dim
    ratio = 4.0 if family is Family.GPT2 else source.uniform(2.0, 4.0)
    return ModelShape(
        name="drawn",
        family=family,
        num_hidden_layers=source.randint(1, 16),
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads if family is Family.GPT2 else heads // source.choice(groups),
        intermediate_size=64 * round(ratio * width / 64),
        vocab_size=source.choice((1000, 8191, 32000, 50257, 128256)),
        max_position_embeddings=8192,
        tie_word_embeddings=source.random() < 0.3,
    )


def _setup(source: random.Random) -> TrainSetup:
    checkpointing, policy = source.choice(_CHECKPOINTING)
    return TrainSetup(
        strategy=source.choice(list(ShardingStrategy)),
        api=source.choice(list(Api)),
        precision=Precision.parse(source.choice(_PRECISIONS)),
        offload=source.choice((Offload.NONE, Offload.NONE, Offload.PARAMS)),
        checkpointing=checkpointing,
        checkpointing_policy=policy,
        world_size=source.choice(_WORLDS),
        micro_batch_size=source.randint(1, 6),
        sequence_length=source.choice((512, 1024, 2000, 2048, 3072, 4096, 8192)),
        gradient_accumulation_steps=source.choice((1, 1, 2)),
        max_grad_norm=source.choice((None, 1.0)),
        wrap=source.choice((Wrap.BLOCK, Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.NONE)),
        compile=True,
    )
