"""Random small models of the catalogue's architectures, in recorded code, and random setups, for ``validate``."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Literal

import msgspec

from fsdp_bench.catalog.architectures import FOLDERS, is_recorded, recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.recording import recorded_config
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import ALL_LINEAR, LoRA
from fsdp_bench.spec.recording.config import (
    HEADS,
    HIDDEN,
    LAYERS,
    LOOPING_TYPES,
    POSITIONS,
    SIZES,
    WINDOWS,
    loops_over_sequence,
)
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.variants import kind_of
from fsdp_bench.spec.setup import Loss, Offload, OptimizerKind, TrainSetup, Wrap
from fsdp_bench.spec.subprocesses.dry_run import ModelCode
from tools.validate.random_setups import Cell, draw_setup, drawn_entry

_LENGTHS = (64, 128, 192, 320, 512)
_OF_LOOPS = (4096,)
"""The length for which code is recorded that loops over the sequence."""
_WINDOWS = (128, 256)
_BASES: tuple[tuple[Literal["bf16", "nf4"] | None, ...], ...] = ((None, "bf16"), ("nf4",))
"""The dtypes in which frozen weights are stored, of LoRA, and of QLoRA, which takes turns with it."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ADAPTED = 5
"""One cell in so many has adapters."""
_OFFLOADED = 0.15
"""The share of cells without adapters whose activations are offloaded."""


Adapted = tuple[dict[str, Any], LoRA, RecordedModel]
"""A config.json, the adapters in the model, and its recording."""


def endless_architectures(
    seed: int,
    model_type: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
    code: ModelCode = "huggingface",
) -> Iterator[Cell]:
    """Yield cells that can run, of one model_type or of all recorded ones in turn.

    Every fifth of Hugging Face's has adapters, of LoRA and of QLoRA in turn. A model with adapters is recorded,
    which takes a minute; of a model_type all cells with LoRA have the same, and all with QLoRA.

    Without a model_type those are left out that loop over the sequence, whose dry runs take a minute. ``progress`` is
    called with what is recorded.

    Raises:
        SpecError: for a model_type that was not recorded.
        MachineError: if transformers or PEFT is missing.
    """
    source = random.Random(seed)
    types = sorted({entry.family for entry in models() if is_recorded(entry.family, FOLDERS[code])})
    if model_type is not None and model_type not in types:
        raise SpecError(f"model_type: {model_type!r} is not allowed; one of {', '.join(types)}")
    chosen = [model_type] if model_type is not None else [one for one in types if one not in LOOPING_TYPES]
    adapted: dict[tuple[str, bool], Adapted] = {}
    for number, kind in enumerate(cycle(chosen)):
        has_adapters = code == "huggingface" and kind not in LOOPING_TYPES and number % _ADAPTED == _ADAPTED - 1
        key = kind, bool(number // _ADAPTED % len(_BASES))
        cell = None
        while cell is None:
            entry = drawn_entry(source, kind)
            if has_adapters and key not in adapted:
                adapted[key] = _adapted(source, entry, _BASES[key[1]], progress)
            cell = _drawn(source, entry, adapted[key] if has_adapters else None, code)
        yield cell


def _adapted(
    source: random.Random,
    entry: ModelEntry,
    bases: Sequence[Literal["bf16", "nf4"] | None],
    progress: Callable[[str], None],
) -> Adapted:
    """Return a small model with adapters, recorded for sequences that are longer than its sliding window."""
    config = _small(source, entry)
    while not _is_recorded(config, entry.name):
        config = _small(source, entry)
    lora = LoRA(
        rank=source.choice((4, 8, 16)),
        targets=(ALL_LINEAR,),
        dropout=0.0 if config.keys() & _EXPERTS else source.choice((0.0, 0.1)),  # PEFT's experts have none
        base=source.choice(bases),
    )
    what = f"{config['architectures'][0]} with {lora.title}"
    code = recorded_config(config, max(_LENGTHS), lambda kind: progress(f"recording {what}: {kind}"), lora)
    return config, lora, recorded_model(code, what)


def _is_recorded(config: dict[str, Any], name: str) -> bool:
    try:
        recorded_architecture(config, max(_LENGTHS), name)
    except SpecError:
        return False  # two drawn sizes contradict each other
    return True


def _drawn(source: random.Random, entry: ModelEntry, adapted: Adapted | None, code: ModelCode) -> Cell | None:
    """Return a cell, or None where two drawn values contradict each other."""
    lora: LoRA | None = None
    try:
        if adapted is None:
            config = _small(source, entry)
            lengths = _OF_LOOPS if loops_over_sequence(config) else _LENGTHS
            setup = _setup(source, (Wrap.BLOCK, Wrap.BLOCK_AND_ENDS, Wrap.SIZE, Wrap.NONE), lengths)
            model = recorded_architecture(config, setup.sequence_length, entry.name, FOLDERS[code])
            offloads = model.code.has_offloaded and source.random() < _OFFLOADED
            setup = msgspec.structs.replace(setup, activation_offload=offloads)
        else:
            config, lora, model = adapted
            setup = _setup(source, (Wrap.BLOCK, Wrap.NONE, Wrap.BLOCK_AND_ADAPTERS))
        if setup.sequence_length < model.shortest_sequence or why_impossible(model, setup, "cuda") is not None:
            return None
        model.code.variant(kind_of(setup, model.has_frozen_parameters), setup.micro_batch_size == 1)
    except SpecError:
        return None
    return Cell(config=config, model=model, setup=setup, lora=lora)


def _setup(source: random.Random, wraps: tuple[Wrap, ...], lengths: tuple[int, ...] = _LENGTHS) -> TrainSetup:
    """Return a random setup, with the wrapping and the losses that recorded models have."""
    drawn = draw_setup(source, "cuda", small=False)
    wrap = drawn.wrap if drawn.wrap in wraps else wraps[0]
    if Wrap.BLOCK_AND_ADAPTERS in wraps and source.random() < 0.3:
        wrap = Wrap.BLOCK_AND_ADAPTERS
    optimizer = drawn.optimizer if drawn.optimizer is not OptimizerKind.MUON else OptimizerKind.ADAMW_FOREACH
    return msgspec.structs.replace(
        drawn,
        wrap=wrap,
        optimizer=optimizer,
        loss=Loss.PLAIN,
        fp32_head=False,
        activation_offload=False,
        offload=Offload.NONE if drawn.offload is Offload.OPTIMIZER else drawn.offload,
        sequence_length=source.choice(lengths),
    )


def _small(source: random.Random, entry: ModelEntry) -> dict[str, Any]:
    """Return a model's config.json with small sizes; its settings and the order of its kinds of layers stay."""
    config = entry.hf_config()
    kv_heads, each = source.choice((2, 3, 4)), source.choice((2, 3, 4))
    given_heads = next(config[name] for name in HEADS if name in config)
    given_kv = config.get("num_key_value_heads", given_heads)
    heads = each if given_kv == 1 else kv_heads if given_kv == given_heads else kv_heads * each
    head = 8 * source.randint(1, 8)
    sizes = {name: 8 * source.randint(4, 40) for name in SIZES}
    hidden = heads * (8 * source.randint(1, 8) if {"head_dim", "d_kv"} & config.keys() else head)
    sizes |= dict.fromkeys(HEADS, heads) | dict.fromkeys(HIDDEN, hidden) | dict.fromkeys(POSITIONS, 1024)
    sizes |= {"num_key_value_heads": 1 if given_kv == 1 else kv_heads, "head_dim": head, "d_kv": head}
    sizes |= {"vocab_size": source.randint(300, 3000), "num_labels": source.randint(2, 100)}
    sizes |= {"patch_size": (patch := source.choice((8, 14, 16))), "image_size": patch * source.randint(2, 9)}
    sizes |= dict.fromkeys(_EXPERTS, 8 * source.randint(4, 8))
    sizes |= {"num_experts_per_tok": min(config.get("num_experts_per_tok") or 1, source.randint(2, 6))}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * source.randint(1, 3)}
    sizes |= {"linear_key_head_dim": head, "linear_value_head_dim": 8 * source.randint(1, 6)}
    layers = _depth(source, config)
    changed = {
        **{name: sizes[name] for name in SIZES if config.get(name) is not None},
        **{name: layers for name in LAYERS if config.get(name) is not None},
        **{name: source.choice(_WINDOWS) for name in WINDOWS if config.get(name) is not None},
    }
    kinds = {"layer_types": config["layer_types"][:layers]} if config.get("layer_types") else {}
    return {**config, **changed, **kinds, "pad_token_id": 0}  # one of the small vocabulary's


def _depth(source: random.Random, config: dict[str, Any]) -> int:
    """Return a small number of layers that differs from the model's by whole periods of kinds of layers."""
    given = next(int(config[name]) for name in LAYERS if name in config)
    return int(given % 12 + 12 * source.randint(0, 1)) or 12
