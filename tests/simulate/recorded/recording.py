"""Recordings of the models in users.py, made in pytest's own process."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path

import pytest

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.estimate import KERNELS, predict_memory
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.recording import record as recording
from fsdp_bench.train.recording.subjects import of_module

OBSERVED = KERNELS["cuda-observed"]


def user_module(function: str, block: str | None = None) -> UserModule:
    return UserModule(
        function=f"tests.simulate.recorded.users:{function}", block=block, folder=str(Path(__file__).parents[3])
    )


def record_here(module: UserModule, kinds: Collection[str] | None = None, only: int | None = None) -> RecordedModel:
    """Record as ``python -m fsdp_bench.train.recording.main`` does, without importing torch again.

    Args:
        module: the model.
        kinds: the variants to record; None for all, which takes longer.
        only: the length of all sequences, where the recording is for one alone.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        unpacked_sequences(),
        as_on_cuda(),
        warnings.catch_warnings(action="ignore"),
    ):
        if kinds is not None:
            patch.setattr(recording, "KINDS", tuple(kind for kind in recording.KINDS if kind.name in kinds))
        return recorded_model(recording.record(of_module(module, only)), "own")


def assert_phases_equal_the_dry_run(model: RecordedModel, module: UserModule, setup: TrainSetup, rank: int) -> None:
    ((_, answer),) = dry_runs([DryRunSpec(setup=setup, module=module, rank=rank)])
    assert answer.result is not None, answer.error
    predicted = predict_memory(model, setup, OBSERVED, rank).phases
    assert {phase: predicted[phase] for phase in answer.result.phases} == answer.result.phases
