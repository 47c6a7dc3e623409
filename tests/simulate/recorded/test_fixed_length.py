"""Code that loops over the sequence: a recording of it is valid for one sequence length."""

from __future__ import annotations

from functools import cache

import pytest

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Api, Checkpointing, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.train.recording.main import of_module
from tests.predicted import memory_of
from tests.simulate.comparing import assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here
from tests.simulate.recorded.users import user_module

LENGTH = 96
"""Three parts of the sequence: the first, one in between, the last."""
MODULE = user_module("loops_over_sequence", "tests.simulate.recorded.users:_Chunked")


@cache
def recorded() -> RecordedModel:
    return record_here(of_module, MODULE, LENGTH, variants=("fp32",))


def test_a_loop_over_the_sequence_is_refused_with_the_option_that_helps() -> None:
    with pytest.raises(SpecError, match="--fixed-length records it for one length"):
        record_here(of_module, MODULE)


@pytest.mark.parametrize(
    ("api", "batch", "checkpointing"),
    [
        pytest.param(Api.FSDP2, 1, Checkpointing.NONE, marks=pytest.mark.slow),
        (Api.FSDP1, 4, Checkpointing.FULL),
        (Api.FSDP2, 7, Checkpointing.SELECTIVE),
    ],
)
def test_phases_at_the_recorded_length_equal_the_dry_run(api: Api, batch: int, checkpointing: Checkpointing) -> None:
    setup = TrainSetup(
        api=api, world_size=4, sequence_length=LENGTH, micro_batch_size=batch, checkpointing=checkpointing
    )
    assert_recorded_equals_dry_runs(recorded(), DryRunSpec(setup=setup, module=MODULE))


def test_another_length_is_refused() -> None:
    with pytest.raises(SpecError, match=f"recorded for {LENGTH} tokens; record it with --seq 192 --fixed-length"):
        memory_of(recorded(), TrainSetup(world_size=4, sequence_length=192))
    assert (recorded().shortest_sequence, recorded().longest_sequence) == (LENGTH, LENGTH)
