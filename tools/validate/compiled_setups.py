"""Draws setups with compiled blocks, of benchmark models and of Hugging Face's: real sizes, few layers, on CUDA."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.recorded import BENCHMARK, FLOAT8, FOLDER
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.config import HEADS, HIDDEN, LAYERS, POSITIONS, WINDOWS
from fsdp_bench.spec.setup import Api, Checkpointing, Float8, Offload, Precision, ShardingStrategy, TrainSetup, Wrap
from tools.validate.random_setups import Cell

_PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "bf16-true")
_WORLDS = (2, 4, 8, 16, 64, 128, 512)
_CHECKPOINTING = (
    (Checkpointing.NONE, None),
    (Checkpointing.FULL, None),
    (Checkpointing.FULL, "every-2-blocks"),
    (Checkpointing.SELECTIVE, None),
    (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT),
)


def draw_compiled_cells(count: int, seed: int, float8: bool = False) -> tuple[Cell, ...]:
    """Return ``count`` different cells that compile and whose compiled blocks are predicted, in float8 or not."""
    source = random.Random(seed)
    cells: dict[Cell, None] = {}
    while len(cells) < count:
        try:
            shape, setup = _shape(source), _setup(source)
            if float8:
                setup = replace(setup, float8=source.choice((Float8.TENSORWISE, Float8.ROWWISE)))
        except SpecError:
            continue  # two drawn values contradict each other
        if why_impossible(shape, setup, "cuda") is None and why_eager(shape, setup, CUDA) is None:
            cells[Cell(model=shape, setup=setup)] = None
    return tuple(cells)


def draw_compiled_architectures(count: int, seed: int, model_type: str | None) -> tuple[Cell, ...]:
    """Return ``count`` cells with Hugging Face's code whose compiled blocks are predicted, of one model_type or of all.

    Raises:
        SpecError: for a model_type whose compiled blocks are not recorded.
    """
    files = {path.name.partition(".")[0] for path in FOLDER.glob("*.json.xz")}
    types = sorted(files - {BENCHMARK, FLOAT8})
    if model_type is not None and model_type not in types:
        raise SpecError(
            f"model_type: {model_type!r} is not allowed; compiled blocks are recorded of {', '.join(types)}"
        )
    source = random.Random(seed)
    chosen = [model_type] if model_type is not None else types
    cells: list[Cell] = []
    while len(cells) < count:
        kind = chosen[len(cells) % len(chosen)]
        entry = source.choice([entry for entry in models() if entry.family == kind])
        cell = _architecture_cell(source, entry)
        if cell is not None:
            cells.append(cell)
    return tuple(cells)


def _architecture_cell(source: random.Random, entry: ModelEntry) -> Cell | None:
    """Return a cell with a model's settings and drawn sizes; None where drawn values contradict each other."""
    try:
        setup, config = _setup(source), _config(source, entry)
        model = recorded_architecture(config, setup.sequence_length, entry.name)
    except SpecError:
        return None
    is_recorded = setup.sequence_length % model.code.multiple == 0 and why_eager(model, setup, CUDA) is None
    if not is_recorded or why_impossible(model, setup, "cuda") is not None:
        return None
    return Cell(config=config, model=model, setup=setup)


def _config(source: random.Random, entry: ModelEntry) -> dict[str, Any]:
    """Return a model's config.json with drawn sizes, beyond which no sequence is; its settings stay."""
    config, shape, layers = entry.hf_config(), _shape(source), source.randint(4, 12)
    given_heads = next(config[name] for name in HEADS if name in config)
    is_grouped = config.get("num_key_value_heads", given_heads) < given_heads
    sizes = {
        **dict.fromkeys(HIDDEN, 64 * source.randint(4, 80) if "head_dim" in config else shape.hidden_size),
        **dict.fromkeys(HEADS, shape.num_attention_heads),
        **dict.fromkeys(LAYERS, layers),
        **dict.fromkeys(POSITIONS, 8192),
        **dict.fromkeys(WINDOWS, 1 << 20),
        "num_key_value_heads": shape.num_key_value_heads if is_grouped else shape.num_attention_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "n_inner": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
    }
    drawn = {name: size for name, size in sizes.items() if config.get(name) is not None}
    if config.get("layer_types"):
        drawn["layer_types"] = config["layer_types"][:layers]
    return {**config, **drawn, "pad_token_id": 0}


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
