"""The code to record: Hugging Face's or torchtitan's of a config.json, or what a user's function returns."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import RANK, LoRA
from fsdp_bench.spec.recording.architecture import Architecture, side_of
from fsdp_bench.spec.recording.config import complete, layer_kinds, layers_to_record, of_layers, settings, symbols
from fsdp_bench.spec.recording.recorded import Origin
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import SIZES, UserModule
from fsdp_bench.train.models import torchtitan as torchtitans
from fsdp_bench.train.models.huggingface import (
    ATTENTION,
    batch_of,
    build,
    config_class,
    layers_of,
    learned_positions,
    sliding_window_of,
    with_layers,
)
from fsdp_bench.train.models.lora import adapted
from fsdp_bench.train.models.user_module import load_user_module
from fsdp_bench.train.recording.points import Point, batches, buildable, models, ranks
from fsdp_bench.train.recording.record import Subject


def huggingface(
    config: Mapping[str, Any], sequence_length: int, lora: LoRA | None = None, only: int | None = None
) -> Subject:
    """Return the code of a config.json, with as few blocks as show which of them are alike; ``only``: for one length.

    Raises:
        SpecError: for a config that transformers does not know or refuses.
    """
    found = layers_of(config)
    window = sliding_window_of(config)
    beyond = window - 1 if window is not None and sequence_length >= window else 0  # then a mask is built
    longest = window - 1 if window is not None and not beyond else None
    short = with_layers(config, found.to_record)
    name = ""

    def make(point: Point) -> tuple[nn.Module, Any]:
        nonlocal name
        model, name = build(short) if lora is None else adapted(short, lora)
        return model, batch_of(model, point["B"], point["S"])

    with torch.device("meta"):
        bare, name = build(short)
    left_out = {stack: count - found.to_record for stack, count in found.counts.items()}
    return Subject(
        make,
        batches(beyond, only),
        _origin("huggingface", name, lora, config.get(ATTENTION)),
        only=only,
        beyond=beyond,
        longest=longest,
        positions=learned_positions(bare),
        left_out=left_out,
    )


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
        _origin("huggingface", name, lora),
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
        _origin("torchtitan", name),
        loss=torchtitans.loss_of,
        block_path=torchtitans.BLOCKS[str(config["model_type"])],
        architecture=like.architecture,
    )


def of_module(module: UserModule, only: int | None = None) -> Subject:
    """Return the code of a user's function, which must take the batch size and the sequence length.

    ``only``: for one sequence length.

    Raises:
        SpecError: if it does not.
    """

    def make(point: Point) -> tuple[nn.Module, Any]:
        setup = TrainSetup(micro_batch_size=point["B"], sequence_length=point["S"])
        given = {"micro_batch_size": point["B"], "sequence_length": point["S"]}
        spec = UserModule(function=module.function, block=module.block, folder=module.folder, arguments=given)
        try:
            user = load_user_module(spec, setup, torch.get_default_dtype(), torch.empty(0).device)
        except SpecError as error:
            if "makes its own batch" not in str(error):
                raise
            needed = " and ".join(SIZES)
            raise SpecError(f"module: {module.function}() needs the parameters {needed} to be recorded") from None
        return user.model, user.batch

    origin = _origin("module", module.function)
    return Subject(make, batches(0, only), origin, block_path=module.block, only=only)


def _origin(code: str, architecture: str, lora: LoRA | None = None, attention: str | None = None) -> Origin:
    versions = {"torch": str(torch.__version__)}
    packages = {"huggingface": ["transformers"], "torchtitan": ["torchtitan"]}
    for package in [*packages.get(code, ()), *(lora.packages if lora is not None else ())]:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Origin(code=code, architecture=architecture, versions=versions, date=today, lora=lora, attention=attention)
