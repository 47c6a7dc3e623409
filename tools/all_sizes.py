"""``python -m tools.all_sizes CODE [PARENT]``: record an architecture's code for all sizes, with torch.

CODE is huggingface or torchtitan. All else is as ``fsdp_bench.train.recording.main`` has it. The code is run in small
models. Their sizes are unlike each other, so that hardly two formulas agree at all points, and keep what decides which
kernels run: a head is a multiple of 8 wide, and heads are a multiple of the heads of keys and values.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import RANK, LoRA
from fsdp_bench.spec.recording.config import (
    ANYWHERE,
    HEADS,
    HIDDEN,
    LAYERS,
    PER_LAYER,
    POSITIONS,
    SIZES,
    WINDOWS,
    Architecture,
    ConfigClass,
    complete,
    layer_kinds,
    layers_to_record,
    period,
    settings,
    side_of,
    symbols,
)
from fsdp_bench.spec.subprocesses.model_code import RecordingSpec
from fsdp_bench.train.models import torchtitan as torchtitans
from fsdp_bench.train.models.huggingface import batch_of, build, config_class, learned_positions
from fsdp_bench.train.models.lora import adapted
from fsdp_bench.train.recording.formulas import Point
from fsdp_bench.train.recording.main import BATCHES, batches, main, origin
from fsdp_bench.train.recording.record import Subject

WINDOW = 16
"""The window of layers that do not see everything, where sequences are longer."""


def architecture(
    config: Mapping[str, Any], sequence_length: int, only: int | None = None, lora: LoRA | None = None
) -> Subject:
    """Return the code of a config.json, for all sizes: of small models, as many as its formulas need.

    ``sequence_length`` says on which side of a sliding window sequences are; ``only`` is the length, if the recording
    is for one alone. A recording with PEFT's adapters is for all ranks but 1.

    Raises SpecError for a config that transformers does not know or refuses.
    """
    kind = config_class(str(config.get("model_type")))
    full = complete(config, kind)
    if "head_width" in settings(full):
        raise SpecError("head_width: only heads that are a multiple of 8 wide are recorded for all sizes")
    is_quantized = lora is not None and lora.is_quantized
    side, layers, made = side_of(full, sequence_length), layers_to_record(full), models(full, is_quantized)
    given = [buildable(each, kind, layers, WINDOW if side == "beyond" else 1 << 20) for each in made]
    values = [{**symbols(each), **batch} for each, batch in zip(made, batches(0, only), strict=True)]
    if lora is not None:
        values = [{**each, RANK: rank} for each, rank in zip(values, ranks(), strict=True)]

    def make(point: Point) -> tuple[nn.Module, Any]:
        number = next(n for n, each in enumerate(values) if {**each, "B": point["B"]} == point)
        model, _ = build(given[number]) if lora is None else adapted(given[number], replace(lora, rank=point[RANK]))
        return model, batch_of(model, point["B"], point["S"])

    with torch.device("meta"):
        bare, name = build(given[0])
    return Subject(
        make,
        values,
        origin("huggingface", name, lora),
        only=only,
        positions=learned_positions(bare),
        architecture=Architecture(
            model_type=full["model_type"],
            config_class=kind,
            settings=settings(full),
            layer_kinds=tuple(of_layers(layer_kinds(full), layers)) if layer_kinds(full) else (),
            side=side,
        ),
    )


def torchtitan(config: Mapping[str, Any], sequence_length: int) -> Subject:
    """Return torchtitan's code of a config.json, for all sizes, as ``architecture`` does Hugging Face's.

    Raises:
        MachineError: if torchtitan is not installed.
        SpecError: for a config that torchtitan has no code of.
    """
    like = architecture(config, sequence_length)
    assert like.architecture is not None
    kind = like.architecture.config_class
    full = complete(config, kind)
    given = [buildable(each, kind, layers_to_record(full), None) for each in models(full)]
    lengths = [point["S"] for point in like.points]

    def make(point: Point) -> tuple[nn.Module, Any]:
        model, _ = torchtitans.build(given[lengths.index(point["S"])], point["S"])
        return model, torchtitans.batch_of(point["B"], point["S"])

    with torch.device("meta"):
        _, name = torchtitans.build(given[0], lengths[0])
    return Subject(
        make,
        like.points,
        origin("torchtitan", name),
        loss=torchtitans.loss_of,
        block_path=torchtitans.BLOCKS[str(config["model_type"])],
        architecture=like.architecture,
    )


def subject_of(spec: RecordingSpec, code: str) -> Subject:
    """Return the code to record."""
    assert spec.config is not None
    if code == "torchtitan":
        return torchtitan(spec.config, spec.sequence_length)
    return architecture(spec.config, spec.sequence_length, spec.only_length, spec.lora)


# -- the sizes of the small models ------------------------------------------------------------------------------------


_MODELS = {
    "key_value_heads": (4, 3, 5, 7),
    "heads_of_each": (5, 5, 2, 3),
    "hidden_of_each_head": (8, 40, 32, 8),
    "head": (80, 16, 32, 88),
    "intermediate_size": (64, 240, 64, 152),
    "d_ff": (64, 240, 64, 152),
    "n_inner": (64, 240, 64, 152),
    "vocab_size": (223, 485, 269, 349),
    "positions": (313, 278, 329, 275),
    "num_labels": (24, 16, 11, 17),
    "patches_a_side": (5, 3, 7, 8),
    "patch_size": (6, 10, 14, 12),
    "intermediate_size_mlp": (256, 200, 272, 272),
    "moe_intermediate_size": (224, 192, 160, 128),
    "shared_expert_intermediate_size": (160, 80, 336, 192),
    "experts": (88, 80, 64, 80),
    "num_experts_per_tok": (4, 6, 2, 2),
    "q_lora_rank": (160, 136, 72, 224),
    "kv_lora_rank": (112, 64, 152, 136),
    RANK: (56, 40, 72, 16),
    "qk_nope_head_dim": (16, 24, 80, 88),
    "qk_rope_head_dim": (72, 88, 72, 24),
    "v_head_dim": (24, 48, 72, 104),
    "linear_num_key_heads": (7, 4, 7, 6),
    "linear_num_value_heads": (14, 20, 28, 18),
    "linear_key_head_dim": (88, 24, 72, 16),
    "linear_value_head_dim": (40, 48, 32, 40),
}
"""No two products of up to three of these, of the batch size and of the length are in the same proportion at all
points (tests/tools/test_recording_points.py)."""

_MULTIPLIED = {"key_value_heads": 16, "intermediate_size": 16}
"""Factors of sizes where weights are in 4 bits: each layer then has a multiple of the weights that are scaled together.
A factor that is the same at all points keeps products apart."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def models(full: Mapping[str, Any], is_quantized: bool = False) -> list[dict[str, Any]]:
    """Return small models with the settings of a complete config, one for each of BATCHES."""
    times = _MULTIPLIED if is_quantized else {}
    drawn = {name: [value * times.get(name, 1) for value in values] for name, values in _MODELS.items()}
    return [_model(full, {name: values[index] for name, values in drawn.items()}) for index in range(len(BATCHES))]


def ranks() -> list[int]:
    """Return the rank of adapters at each point."""
    return list(_MODELS[RANK])


def _model(full: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, Any]:
    heads, kv_heads = next(full[name] for name in HEADS if full.get(name)), full["num_key_value_heads"]
    made_kv, each = values["key_value_heads"], values["heads_of_each"]
    made_heads = each if kv_heads == 1 else made_kv if kv_heads == heads else made_kv * each
    hidden = made_heads * values["head" if full["heads_share_hidden_size"] else "hidden_of_each_head"]
    made = {
        **dict.fromkeys(HEADS, made_heads),
        **dict.fromkeys(HIDDEN, hidden),
        **dict.fromkeys(_EXPERTS, values["experts"]),
        **dict.fromkeys(POSITIONS, values["positions"]),
        **dict.fromkeys(("head_dim", "d_kv"), values["head"]),
        **{name: values[name] for name in SIZES if name in values},
        "num_key_value_heads": 1 if kv_heads == 1 else made_kv,
        "image_size": values["patch_size"] * values["patches_a_side"],
    }
    if full.get("num_experts_per_tok") == 1:
        made["num_experts_per_tok"] = 1
    return {**full, **{name: value for name, value in made.items() if full.get(name) is not None}}


def buildable(model: Mapping[str, Any], kind: ConfigClass, num_layers: int, window: int | None) -> dict[str, Any]:
    """Return a small model as a config.json of so many layers, of which some see so many tokens."""
    fields = kind.defaults.keys() | ANYWHERE
    if model["heads_share_hidden_size"]:
        fields -= {"head_dim"}
    given = {name: value for name, value in model.items() if value is not None or name in kind.defaults}
    made = {name: value for name, value in given.items() if name in fields or name.endswith("_token_id")}
    made |= {name: num_layers for name in LAYERS if made.get(name) is not None}
    made |= {name: of_layers(made[name], num_layers) for name in PER_LAYER if made.get(name)}
    made |= {name: window for name in WINDOWS if isinstance(made.get(name), int)}
    tokens = {name: None if value is None else 0 for name, value in made.items() if name.endswith("_token_id")}
    return made | tokens  # those of a vocabulary this small


def of_layers(kinds: Sequence[Any], count: int) -> list[Any]:
    """Return a list of the kinds of so many layers: its beginning, or the list with what repeats at its end again."""
    longer, each = list(kinds), period(kinds)
    while len(longer) < count:
        longer.append(longer[-each])
    return longer[:count]


if __name__ == "__main__":
    main(partial(subject_of, code=sys.argv.pop(1)))
