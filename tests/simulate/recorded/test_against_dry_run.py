"""A recorded model's predictions equal the dry run of the really wrapped code, to the byte in every phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.estimate import KERNELS, predict_memory
from fsdp_bench.simulate.candidate_ranks import candidate_ranks
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.recording.request import RecordingSpec
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.sweep.recording import record
from tests.profiles import validating
from tests.simulate.recorded import users

OBSERVED = KERNELS["cuda-observed"]
ROOT = str(Path(__file__).parents[3])

SETUPS = [
    {"api": "fsdp2", "world_size": 8},
    {"api": "fsdp2", "world_size": 64, "checkpointing": "full", "precision": "bf16-true", "micro_batch_size": 2},
    {"api": "fsdp2", "world_size": 4, "checkpointing": "selective", "strategy": "HYBRID_SHARD", "precision": "fp32"},
    {"api": "fsdp1", "world_size": 8, "checkpointing": "selective", "gradient_accumulation_steps": 3},
    {"api": "fsdp1", "world_size": 512, "checkpointing": "full", "strategy": "SHARD_GRAD_OP", "max_grad_norm": 1.0},
    {"api": "fsdp1", "world_size": 2, "use_orig_params": False, "offload": "params", "optimizer": "sgd"},
    {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full", "micro_batch_size": 3},
    {
        "api": "fsdp2",
        "world_size": 8,
        "wrap": "none",
        "sync_every_micro_batch": False,
        "gradient_accumulation_steps": 2,
    },
    {"api": "fsdp2", "world_size": 8, "checkpointing": "full", "checkpointing_policy": "every-2-blocks"},
    {"api": "fsdp1", "world_size": 8, "checkpointing": "selective", "checkpointing_policy": "every-second-product"},
    {"api": "fsdp2", "world_size": 8, "checkpointing": "selective", "checkpointing_policy": "aten.mm,aten.silu"},
    {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "optimizer": "adafactor", "micro_batch_size": 3},
    {"api": "fsdp1", "world_size": 8, "wrap": "size", "min_num_params": 20000, "checkpointing": "full"},
    {"api": "fsdp2", "world_size": 64, "wrap": "size", "min_num_params": 100},
]


def _spec(function: str) -> UserModule:
    return UserModule(function=f"tests.simulate.recorded.users:{function}", block=users.BLOCK, folder=ROOT)


@pytest.fixture(scope="module")
def recorded() -> RecordedModel:
    return recorded_model(record(RecordingSpec(module=_spec("llama"))), "own")


def _setup(fields: dict[str, object]) -> TrainSetup:
    return TrainSetup(**{"precision": "bf16-mixed", "sequence_length": 96, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [6, 9])
def test_every_phase_equals_the_dry_run(recorded: RecordedModel, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(users.LAYERS, str(layers))
    model = recorded.with_layers(layers)
    quick = SETUPS[::2] if layers == 6 else SETUPS[1:2]
    setups = [_setup(fields) for fields in (SETUPS if validating() else quick)]
    ranks = [candidate_ranks(model, setup, OBSERVED)[0] for setup in setups]
    specs = [
        DryRunSpec(setup=setup, module=_spec("llama"), rank=rank) for setup, rank in zip(setups, ranks, strict=True)
    ]
    for index, answer in dry_runs(specs):
        assert answer.result is not None, answer.error
        predicted = predict_memory(model, setups[index], OBSERVED, ranks[index]).phases
        assert {phase: predicted[phase] for phase in answer.result.phases} == answer.result.phases, setups[index]


def test_one_block_stands_for_others_and_parameters_are_counted(recorded: RecordedModel) -> None:
    deep = recorded.with_layers(40)
    each = (deep.num_parameters - recorded.num_parameters) / 34
    assert each == 128 * 128 * 3 + 3 * 128 * 256 + 2 * 128
    setup = _setup({"api": "fsdp2", "world_size": 8})
    memory = [predict_memory(recorded.with_layers(n), setup, OBSERVED).peak_allocated_bytes for n in (20, 30, 40)]
    assert memory[2] - memory[1] == memory[1] - memory[0] > 0


@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [
        ({"loss": "chunked"}, "cuda", "your own model's is not replaced by another kind"),
        ({"wrap": "block-and-ends"}, "cuda", "of this model it is not known which modules those are"),
        ({}, "cpu", "on a CPU measure it"),
    ],
)
def test_what_a_recording_does_not_hold_for_is_refused(
    recorded: RecordedModel, fields: dict[str, object], device: str, expected: str
) -> None:
    assert expected in str(why_impossible(recorded, _setup({"api": "fsdp2", "world_size": 8, **fields}), device))


def test_flops_are_those_of_the_benchmark_model(recorded: RecordedModel) -> None:
    matrices = 2 * (128 * 128 * 3 + 3 * 128 * 256)
    attention = 4 * 128 * (96 + 1) / 2
    assert recorded.model_flops_per_token(96) == 3 * (6 * (matrices + attention) + 2 * 128 * 500)


def test_a_bare_loss_is_recorded_and_what_depends_on_data_is_refused() -> None:
    module = UserModule(function="tests.simulate.recorded.users:bare_loss", folder=ROOT)
    model = recorded_model(record(RecordingSpec(module=module)), "bare")
    assert model.num_parameters == 6 * (32 * 32 + 32)
    module = UserModule(function="tests.simulate.recorded.users:depends_on_data", folder=ROOT)
    with pytest.raises(MachineError, match="depend on data"):
        record(RecordingSpec(module=module))
