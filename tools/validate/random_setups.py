"""Random models and setups with a fixed seed, for ``validate``: everything that can be predicted may be drawn."""

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.recorded import BENCHMARK, FLOAT8, FOLDER
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT, OPERATORS
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.recording.config import HEADS, HIDDEN, LAYERS, POSITIONS, WINDOWS
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Float8,
    Loss,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.validate.predictable import cell_label

Code = Literal["huggingface", "torchtitan", "benchmark"]
"""Whose code of the models is drawn."""
Progress = Callable[[int, int, str], None]
"""Called with how many are done, of how many, and what is being done."""


def no_progress(_done: int, _total: int, _what: str) -> None:
    """Show nothing."""


_DTYPES = ("fp32", "bf16", "fp16")
PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "fp16-mixed", "bf16-true", "bf16/bf16/fp32")
OPTIMIZERS = tuple(kind for kind in OptimizerKind if kind is not OptimizerKind.ADAMW_8BIT)  # no dry run compiles it
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 24, 64, 96, 100, 384, 1000, 4096)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One model and one setup. With a config.json the model is the recording of Hugging Face's or torchtitan's code."""

    model: Model
    setup: TrainSetup
    rank: int = 0
    """The rank whose memory is compared."""
    config: dict[str, Any] | None = None
    lora: LoRA | None = None

    @property
    def label(self) -> str:
        """The model and the setup in one line."""
        return cell_label(self.model, self.setup, self.rank)


def draw_cells(count: int, seed: int, device: str = "cpu", small: bool = False) -> tuple[Cell, ...]:
    """Return the first ``count`` of ``endless_cells``."""
    return tuple(islice(endless_cells(seed, device, small), count))


def endless_cells(seed: int, device: str, small: bool = False) -> Iterator[Cell]:
    """Yield cells that can run on ``device`` (``cpu`` or ``cuda``).

    ``small`` draws models and batches that run on real CPU tensors in seconds.
    """
    source = random.Random(seed)
    while True:
        try:
            shape, setup = _shape(source, small), draw_setup(source, device, small)
        except SpecError:
            continue  # two drawn values contradict each other
        if why_impossible(shape, setup, device) is None and not _is_left_out(shape, setup, device):
            yield Cell(model=shape, setup=setup, rank=_rank(source, setup))


def _is_left_out(shape: ModelShape, setup: TrainSetup, device: str) -> bool:
    """Return whether predictions refuse a cell: Muon of DTensors (muon.py).

    And fp32 heads that CUDA's fused attention does not take (attention.py).
    """
    if setup.optimizer is OptimizerKind.MUON and setup.uses_fully_shard:
        return True
    return device == "cuda" and setup.precision.compute == "fp32" and shape.head_dim % 4 != 0


def _rank(source: random.Random, setup: TrainSetup) -> int:
    """Return a random rank for FSDP1, whose shards differ by rank; 0 for other wrappers, where rank 0 has the most."""
    differs = setup.api is Api.FSDP1 and setup.shard_group_size > 1
    return source.randrange(setup.world_size) if differs and source.random() < 0.5 else 0


def _shape(source: random.Random, small: bool) -> ModelShape:
    """Return a random model: 1 to 12 layers, odd and even sizes, grouped keys or not, vocabularies of 1 to 128k."""
    family = source.choice(list(Family))
    heads = source.choice((1, 2, 3, 4, 5, 6, 7, 8))
    head_dim = source.choice((1, 3, 8, 15, 16, 21, 32, 64) if family is Family.GPT2 else (2, 6, 16, 22, 32, 64))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    vocabularies = (1, 31, 97, 1000, 1001) if small else (31, 1000, 1001, 8191, 32000, 50257, 128256)
    return ModelShape(
        name="drawn",
        family=family,
        num_hidden_layers=source.choice((1, 2, 4, source.randint(1, 12))) if small else source.randint(1, 12),
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads if family is Family.GPT2 else source.choice(divisors),
        intermediate_size=source.choice((1, source.randint(2, 64), source.randint(32, 1200))),
        vocab_size=source.choice(vocabularies),
        max_position_embeddings=source.choice((64, 77)) if small else 8192,
        tie_word_embeddings=source.random() < 0.5,
    )


def draw_setup(source: random.Random, device: str, small: bool) -> TrainSetup:
    """Return a random setup. Raises SpecError if two drawn values contradict each other."""
    api = source.choice(list(Api))
    fsdp1: dict[str, Any] = {}
    if api is Api.FSDP1:
        fsdp1 = {"use_orig_params": source.random() < 0.6, "limit_all_gathers": source.random() < 0.7}
    free = Precision(*(source.choice(_DTYPES) for _ in range(3)))
    # On a CPU FSDP1 gathers into a list of as many tensors as there are ranks.
    most = max(WORLDS) if device == "cuda" or api is Api.FSDP2 else 24 if small else 100
    world = source.choice([world for world in WORLDS if world <= most])
    strategy = source.choice(list(ShardingStrategy))
    precision = source.choice((free, Precision.parse(source.choice(PRECISIONS))))
    wrap = source.choice((Wrap.BLOCK, Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.SIZE, Wrap.SIZE, Wrap.NONE))
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    return TrainSetup(
        strategy=strategy,
        api=api,
        precision=precision,
        offload=source.choice((Offload.NONE, Offload.NONE, Offload.PARAMS)),
        checkpointing=(checkpointing := source.choice(list(Checkpointing))),
        checkpointing_policy=_policy(source, checkpointing),
        optimizer=source.choice(OPTIMIZERS),
        optimizer_in_backward=source.random() < 0.2,
        world_size=world,
        shard_size=source.choice((None, source.choice(divisors))) if strategy.is_hybrid else None,
        micro_batch_size=source.randint(1, 4),
        sequence_length=source.choice((1, 8, 33, 64) if small else (1, 128, 200, 512, 1024, 2048, 4096, 8192)),
        gradient_accumulation_steps=source.choice((1, 1, 1, 2, 3, 4)),
        sync_every_micro_batch=source.random() < 0.5,
        max_grad_norm=source.choice((None, 1.0)),
        loss=source.choice((Loss.PLAIN, Loss.PLAIN, Loss.CHUNKED)),
        wrap=wrap,
        min_num_params=source.choice((1, 30, 300, 3000, 20000, 100000)),
        backward_prefetch=source.choice(list(BackwardPrefetch)),
        forward_prefetch=source.random() < 0.25,
        fp32_head=wrap is Wrap.BLOCK_AND_ENDS and precision.compute != "fp32" and source.random() < 0.5,
        **(fsdp1 if api is Api.FSDP1 else _resharding(source, strategy, wrap, divisors)),
    )


def _policy(source: random.Random, checkpointing: Checkpointing) -> str | None:
    """Return a policy for about half of the setups that can have one."""
    if checkpointing is Checkpointing.FULL:
        return source.choice((None, None, "every-2-blocks", "every-3-blocks"))
    if checkpointing is Checkpointing.NONE:
        return None
    some = ",".join(source.sample(OPERATORS, source.randint(1, len(OPERATORS))))
    return source.choice((None, None, EVERY_SECOND_PRODUCT, some))


def _resharding(source: random.Random, strategy: ShardingStrategy, wrap: Wrap, divisors: list[int]) -> dict[str, Any]:
    """Return what a random setup of fully_shard reshards after forward, in half of those that can choose."""
    found: dict[str, Any] = {}
    if strategy is ShardingStrategy.FULL_SHARD and wrap is not Wrap.NONE and len(divisors) > 2:
        found["reshard_after_forward"] = source.choice((None, source.choice(divisors[1:-1])))
    if strategy.reshards_after_forward and wrap.has_blocks:
        found["reshard_last_block"] = source.random() < 0.5
    return found


# -- Setups with compiled blocks, of benchmark models and of Hugging Face's: real sizes, few layers, on CUDA -----------

_COMPILED_PRECISIONS = ("fp32", "bf16-mixed", "bf16-mixed-bf16-reduce", "bf16-true")
_COMPILED_WORLDS = (2, 4, 8, 16, 64, 128, 512)
_COMPILED_CHECKPOINTING = (
    (Checkpointing.NONE, None),
    (Checkpointing.FULL, None),
    (Checkpointing.FULL, "every-2-blocks"),
    (Checkpointing.SELECTIVE, None),
    (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT),
)


def endless_compiled_cells(seed: int, float8: bool = False) -> Iterator[Cell]:
    """Yield cells that compile and whose compiled blocks are predicted, in float8 or not."""
    source = random.Random(seed)
    while True:
        try:
            shape, setup = _compiled_shape(source), _compiled_setup(source)
            if float8:
                setup = replace(setup, float8=source.choice((Float8.TENSORWISE, Float8.ROWWISE)))
        except SpecError:
            continue  # two drawn values contradict each other
        if why_impossible(shape, setup, "cuda") is None and why_eager(shape, setup, CUDA) is None:
            yield Cell(model=shape, setup=setup)


def endless_compiled_architectures(seed: int, model_type: str | None) -> Iterator[Cell]:
    """Yield cells with Hugging Face's code whose compiled blocks are predicted, of one model_type or of all in turn.

    Raises SpecError for a model_type whose compiled blocks are not recorded.
    """
    files = {path.name.partition(".")[0] for path in FOLDER.glob("*.json.xz")}
    types = sorted(files - {BENCHMARK, FLOAT8})
    if model_type is not None and model_type not in types:
        raise SpecError(
            f"model_type: {model_type!r} is not allowed; compiled blocks are recorded of {', '.join(types)}"
        )
    source = random.Random(seed)
    for kind in cycle([model_type] if model_type is not None else types):
        cell = None
        while cell is None:
            cell = _architecture_cell(source, drawn_entry(source, kind))
        yield cell


def drawn_entry(source: random.Random, model_type: str) -> ModelEntry:
    """Return one of the catalogue's models of a model_type."""
    return source.choice([entry for entry in models() if entry.family == model_type])


def _architecture_cell(source: random.Random, entry: ModelEntry) -> Cell | None:
    """Return a cell with a model's settings and drawn sizes; None where drawn values contradict each other."""
    try:
        setup, config = _compiled_setup(source), _config(source, entry)
        model = recorded_architecture(config, setup.sequence_length, entry.name)
    except SpecError:
        return None
    is_recorded = setup.sequence_length % model.code.multiple == 0 and why_eager(model, setup, CUDA) is None
    if not is_recorded or why_impossible(model, setup, "cuda") is not None:
        return None
    return Cell(config=config, model=model, setup=setup)


def _config(source: random.Random, entry: ModelEntry) -> dict[str, Any]:
    """Return a model's config.json with drawn sizes, beyond which no sequence is; its settings stay."""
    config, shape, layers = entry.hf_config(), _compiled_shape(source), source.randint(4, 12)
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


def _compiled_shape(source: random.Random) -> ModelShape:
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


def _compiled_setup(source: random.Random) -> TrainSetup:
    checkpointing, policy = source.choice(_COMPILED_CHECKPOINTING)
    return TrainSetup(
        strategy=source.choice(list(ShardingStrategy)),
        api=source.choice(list(Api)),
        precision=Precision.parse(source.choice(_COMPILED_PRECISIONS)),
        offload=source.choice((Offload.NONE, Offload.NONE, Offload.PARAMS)),
        checkpointing=checkpointing,
        checkpointing_policy=policy,
        world_size=source.choice(_COMPILED_WORLDS),
        micro_batch_size=source.randint(1, 6),
        sequence_length=source.choice((512, 1024, 2000, 2048, 3072, 4096, 8192)),
        gradient_accumulation_steps=source.choice((1, 1, 2)),
        max_grad_norm=source.choice((None, 1.0)),
        wrap=source.choice((Wrap.BLOCK, Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.NONE)),
        compile=True,
    )
