"""Unfused attention adds its mask in place, but under selective checkpointing, whose dispatch mode watches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.train.recording.subjects import of_module
from tests import shapes
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here
from tests.simulate.recorded.users import user_module

LENGTH = 192
MODULE = user_module("grouped_heads", "tests.simulate.recorded.users:_Grouped")
CHECKPOINTING: list[dict[str, str]] = [
    {},
    {"checkpointing": "full"},
    {"checkpointing": "selective"},
    {"checkpointing": "selective", "checkpointing_policy": "aten.bmm"},
    {"checkpointing": "selective", "checkpointing_policy": "aten.add"},
]


@cache
def recorded() -> RecordedModel:
    return record_here(of_module, MODULE, variants=("fp32",))


def from_the_catalog() -> RecordedModel:
    """Return a model whose recording has an addition that makes a tensor."""
    return shapes.recorded("OLMo-3-32B", LENGTH, num_hidden_layers=8)


def _setup(checkpointing: dict[str, str]) -> TrainSetup:
    return TrainSetup(world_size=8, sequence_length=LENGTH, precision="fp32", **checkpointing)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_phases_equal_the_dry_run(checkpointing: dict[str, str]) -> None:
    assert_recorded_equals_dry_runs(recorded(), DryRunSpec(setup=_setup(checkpointing), module=MODULE))


@pytest.mark.parametrize("model", [recorded, from_the_catalog])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING[:3])
def test_the_sum_with_the_mask_takes_memory_only_under_selective_checkpointing(
    model: Callable[[], RecordedModel], checkpointing: dict[str, str]
) -> None:
    log = SimulatedSteps(model(), _setup(checkpointing), OBSERVED).first_steps()
    made = [(e.label, e.num_bytes) for e in log.events if e.kind is Kind.ALLOCATE]
    num_bytes = max(size for label, size in made if label == "aten::_safe_softmax")
    assert (("aten::add", num_bytes) in made) == (checkpointing.get("checkpointing") == "selective")
