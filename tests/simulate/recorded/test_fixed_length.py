"""Code that loops over the sequence runs other operators for another length: it is recorded for one."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.request import RecordingSpec
from fsdp_bench.spec.setup import Api, Checkpointing, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.sweep.recording import record
from tests.simulate.recorded.test_against_dry_run import OBSERVED, ROOT

LENGTH = 160
BLOCK = "tests.simulate.recorded.users:_Chunked"


@pytest.fixture(scope="module")
def module() -> UserModule:
    return UserModule(function="tests.simulate.recorded.users:loops_over_sequence", block=BLOCK, folder=ROOT)


@pytest.fixture(scope="module")
def recorded(module: UserModule) -> RecordedModel:
    spec = RecordingSpec(module=module, sequence_length=LENGTH, fixed_length=True)
    return recorded_model(record(spec), "looping")


def test_a_loop_over_the_sequence_is_refused_with_the_option_that_helps(module: UserModule) -> None:
    with pytest.raises(MachineError, match="--fixed-length records it for one length"):
        record(RecordingSpec(module=module))


def test_for_its_length_every_phase_equals_the_dry_run(module: UserModule, recorded: RecordedModel) -> None:
    setups = [
        TrainSetup(api=api, world_size=4, sequence_length=LENGTH, micro_batch_size=batch, checkpointing=checkpointing)
        for api, batch, checkpointing in (
            (Api.FSDP2, 1, Checkpointing.NONE),
            (Api.FSDP1, 4, Checkpointing.FULL),
            (Api.FSDP2, 7, Checkpointing.SELECTIVE),
        )
    ]
    for index, answer in dry_runs([DryRunSpec(setup=setup, module=module) for setup in setups]):
        assert answer.result is not None, answer.error
        predicted = predict_memory(recorded, setups[index], OBSERVED, answer.result.rank).phases
        assert {phase: predicted[phase] for phase in answer.result.phases} == answer.result.phases, setups[index]


def test_another_length_is_refused(recorded: RecordedModel) -> None:
    with pytest.raises(SpecError, match=f"recorded for {LENGTH} tokens; record it with --seq 192 --fixed-length"):
        predict_memory(recorded, TrainSetup(world_size=4, sequence_length=192), OBSERVED)
    assert (recorded.shortest_sequence, recorded.longest_sequence) == (LENGTH, LENGTH)
