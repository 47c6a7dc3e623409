"""Code that loops over the sequence runs other operators for another length: it is recorded for one."""

from __future__ import annotations

from functools import cache

import pytest

from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Api, Checkpointing, TrainSetup
from tests.simulate.recorded.recording import OBSERVED, assert_phases_equal_the_dry_run, record_here, user_module

LENGTH = 96
"""Three parts of the sequence: the first, one in between, the last."""
MODULE = user_module("loops_over_sequence", "tests.simulate.recorded.users:_Chunked")


@cache
def recorded() -> RecordedModel:
    return record_here(MODULE, ("fp32",), LENGTH)


def test_a_loop_over_the_sequence_is_refused_with_the_option_that_helps() -> None:
    with pytest.raises(SpecError, match="--fixed-length records it for one length"):
        record_here(MODULE)


@pytest.mark.parametrize(
    ("api", "batch", "checkpointing"),
    [
        pytest.param(Api.FSDP2, 1, Checkpointing.NONE, marks=pytest.mark.slow),
        (Api.FSDP1, 4, Checkpointing.FULL),
        (Api.FSDP2, 7, Checkpointing.SELECTIVE),
    ],
)
def test_for_its_length_every_phase_equals_the_dry_run(api: Api, batch: int, checkpointing: Checkpointing) -> None:
    setup = TrainSetup(
        api=api, world_size=4, sequence_length=LENGTH, micro_batch_size=batch, checkpointing=checkpointing
    )
    assert_phases_equal_the_dry_run(recorded(), MODULE, setup, rank=0)


def test_another_length_is_refused() -> None:
    with pytest.raises(SpecError, match=f"recorded for {LENGTH} tokens; record it with --seq 192 --fixed-length"):
        predict_memory(recorded(), TrainSetup(world_size=4, sequence_length=192), OBSERVED)
    assert (recorded().shortest_sequence, recorded().longest_sequence) == (LENGTH, LENGTH)
