"""Hugging Face's or torchtitan's code of a config.json, to be recorded for all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import RANK, LoRA
from fsdp_bench.spec.recording.config import (
    Architecture,
    complete,
    layer_kinds,
    layers_to_record,
    settings,
    side_of,
    symbols,
)
from fsdp_bench.train.models import torchtitan as torchtitans
from fsdp_bench.train.models.huggingface import batch_of, build, config_class, learned_positions
from fsdp_bench.train.models.lora import adapted
from fsdp_bench.train.recording.formulas import Point
from fsdp_bench.train.recording.record import Subject
from fsdp_bench.train.recording.subjects import batches, origin
from tools.all_sizes.points import buildable, models, of_layers, ranks

WINDOW = 16
"""Of layers that do not see everything, where sequences are longer."""


def architecture(
    config: Mapping[str, Any], sequence_length: int, only: int | None = None, lora: LoRA | None = None
) -> Subject:
    """Return the code of a config.json, for all sizes: of small models, as many as its formulas need.

    Args:
        config: the fields of the config.json.
        sequence_length: says on which side of a sliding window sequences are.
        only: the sequence length, if the recording is for one alone.
        lora: PEFT's adapters to put in; the recording is for all ranks but 1.

    Raises:
        SpecError: for a config that transformers does not know or refuses.
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
