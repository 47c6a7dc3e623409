"""Recordings made in pytest's own process, which has imported torch."""

import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.variants import KINDS, with_frozen
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.recording import record
from fsdp_bench.train.recording.record import Subject


def record_here(
    subject: Callable[..., Subject], *arguments: Any, variants: Collection[str] | None = None
) -> RecordedModel:
    """Record as ``python -m fsdp_bench.train.recording.main`` does.

    Args:
        subject: a function of fsdp_bench/train/recording/main.py.
        arguments: its arguments.
        variants: names of the variants to record, from fsdp_bench/spec/recording/variants.py; all by default, which
            takes much longer.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        unpacked_sequences(),
        as_on_cuda(),
        warnings.catch_warnings(action="ignore"),  # of transformers and PEFT
    ):
        if variants is not None:
            patch.setattr(record, "KINDS", [kind for kind in KINDS if kind.name in variants])
            patch.setattr(record, "with_frozen", lambda lora: [k for k in with_frozen(lora) if k.name in variants])
        return recorded_model(record.record(subject(*arguments)), "own")
