"""``python -m fsdp_bench.train.recording.main [PARENT]``: record one model's code: whose, and at which points.

Standard input: a RecordingSpec, as JSON. Standard output: a RecordingAnswer. Standard error: a line for each variant.
"""

import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import torch
from torch import nn

from fsdp_bench.spec.codec import from_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.recorded import MULTIPLE, Origin
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import SIZES, UserModule
from fsdp_bench.spec.subprocesses.model_code import RecordingAnswer, RecordingSpec
from fsdp_bench.train.models.huggingface import (
    ATTENTION,
    batch_of,
    build,
    layers_of,
    learned_positions,
    sliding_window_of,
    unpacked_sequences,
    with_layers,
)
from fsdp_bench.train.models.lora import adapted
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.models.user_module import load_user_module
from fsdp_bench.train.processes.child import answered, answers_only
from fsdp_bench.train.recording.formulas import Point
from fsdp_bench.train.recording.record import Subject, record

BATCHES = ((2, 64), (3, 96), (2, 160), (5, 224))
"""Batch sizes and sequence lengths of the points. Hardly two formulas agree at all of them."""


def batches(beyond: int, only: int | None = None) -> list[Point]:
    """Return batch sizes and sequence lengths, longer than ``beyond``, a sliding window; with ``only`` that length."""
    if only is not None:
        return [{"B": batch, "S": only} for batch, _ in BATCHES]
    shift = -(-beyond // MULTIPLE) * MULTIPLE
    return [{"B": batch, "S": length + shift} for batch, length in BATCHES]


def huggingface(
    config: Mapping[str, Any], sequence_length: int, lora: LoRA | None = None, only: int | None = None
) -> Subject:
    """Return a config.json's code with few blocks (``only``: one length). Raises SpecError if transformers refuses."""
    counts, to_record = layers_of(config)
    window = sliding_window_of(config)
    beyond = window - 1 if window is not None and sequence_length >= window else 0  # then a mask is built
    longest = window - 1 if window is not None and not beyond else None
    short = with_layers(config, to_record)
    name = ""

    def make(point: Point) -> tuple[nn.Module, Any]:
        nonlocal name
        model, name = build(short) if lora is None else adapted(short, lora)
        return model, batch_of(model, point["B"], point["S"])

    with torch.device("meta"):
        bare, name = build(short)
    return Subject(
        make,
        batches(beyond, only),
        origin("huggingface", name, lora, config.get(ATTENTION)),
        only=only,
        beyond=beyond,
        longest=longest,
        positions=learned_positions(bare),
        left_out={stack: count - to_record for stack, count in counts.items()},
    )


def of_module(module: UserModule, only: int | None = None) -> Subject:
    """Return a user function's code (``only``: one length). Raises SpecError if it does not take batch and length."""

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

    return Subject(make, batches(0, only), origin("module", module.function), block_path=module.block, only=only)


def origin(code: str, architecture: str, lora: LoRA | None = None, attention: str | None = None) -> Origin:
    """Return the origin of code that is recorded today, with the versions of its packages."""
    versions = {"torch": str(torch.__version__)}
    packages = {"huggingface": ["transformers"], "torchtitan": ["torchtitan"]}
    for package in [*packages.get(code, ()), *(lora.packages if lora is not None else ())]:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Origin(code=code, architecture=architecture, versions=versions, date=today, lora=lora, attention=attention)


def subject_of(spec: RecordingSpec) -> Subject:
    """Return the code to record."""
    if spec.config is not None:
        return huggingface(spec.config, spec.sequence_length, spec.lora, spec.only_length)
    assert spec.module is not None
    return of_module(spec.module, spec.only_length)


def answer(spec: RecordingSpec, subject_of: Callable[[RecordingSpec], Subject]) -> RecordingAnswer:
    """Record; return the recording or the error."""
    begin = time.perf_counter()

    def recorded() -> RecordingAnswer:
        with unpacked_sequences(), as_on_cuda():
            tell = lambda what: print(f"recording: {what}", file=sys.stderr)  # noqa: E731
            subject = dataclasses.replace(subject_of(spec), before_sm80=spec.before_sm80)
            found = record(subject, tell, spec.activation_offload)
        return RecordingAnswer(recorded=found, seconds=time.perf_counter() - begin)

    return answered(RecordingAnswer, recorded)


def main(subject_of: Callable[[RecordingSpec], Subject]) -> None:
    """Answer standard input; ``subject_of`` returns the code to record."""
    out = answers_only()
    found = answer(from_json(sys.stdin.buffer.read(), RecordingSpec), subject_of)
    out.buffer.write(msgspec.json.encode(found))
    out.flush()


if __name__ == "__main__":
    main(subject_of)
