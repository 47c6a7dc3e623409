"""Recorded models: their predicted peaks against dry runs of their code, their parameters, their FLOPs, and refusals.

Code that loops over the sequence is recorded for one length. Unfused attention adds its mask in place, but under
selective checkpointing, whose dispatch mode watches.
"""

from collections.abc import Callable
from functools import cache

import pytest

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.recording import record
from fsdp_bench.simulate.candidate_ranks import candidate_ranks
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.spec.subprocesses.model_code import RecordingSpec
from fsdp_bench.train.recording.main import of_module
from tests import shapes
from tests.shapes import memory_of
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here
from tests.simulate.recorded.users import BLOCK, user_module

SETUPS: list[dict[str, object]] = [
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
QUICK = (0, 6, 7, 12)
"""Setups of ``make test``: fully_shard by blocks and as one unit that accumulates, DistributedDataParallel, FSDP1 with
units by size."""
VARIANTS = ("bf16", "bf16 autocast", "bf16 cast at blocks")
"""The variants of a recording that these setups use."""


LENGTH = 96
"""Three parts of the sequence in the code that loops over it: the first, one in between, the last."""
LOOP = user_module("loops_over_sequence", "tests.simulate.recorded.users:_Chunked")
GROUPED = user_module("grouped_heads", "tests.simulate.recorded.users:_Grouped")


@cache
def recorded(every_variant: bool = False) -> RecordedModel:
    name, variants = ("llama", None) if every_variant else ("llama_of_4_layers", VARIANTS)
    return record_here(of_module, user_module(name, BLOCK), variants=variants)


@cache
def looping() -> RecordedModel:
    return record_here(of_module, LOOP, LENGTH, variants=("fp32",))


@cache
def grouped() -> RecordedModel:
    return record_here(of_module, GROUPED, variants=("fp32",))


def _setup(fields: dict[str, object]) -> TrainSetup:
    return TrainSetup(**{"precision": "bf16-mixed", "sequence_length": LENGTH, **fields})  # type: ignore[arg-type]


CASES = [
    *(pytest.param(5, number, marks=() if number in QUICK else pytest.mark.slow) for number in range(len(SETUPS))),
    *(pytest.param(9, number, marks=pytest.mark.slow) for number in (0, 1)),
]
"""Numbers of layers and of a setup. Five layers are more than are simulated, and nine more than were recorded."""


@pytest.mark.parametrize(("layers", "number"), CASES)
def test_every_phase_equals_the_dry_run(layers: int, number: int) -> None:
    setup, model = _setup(SETUPS[number]), recorded(number not in QUICK).with_layers(layers)
    module, rank = user_module(f"llama_of_{layers}_layers", BLOCK), candidate_ranks(model, setup, OBSERVED)[0]
    assert_recorded_equals_dry_runs(model, DryRunSpec(setup=setup, module=module, rank=rank))


def test_peak_and_parameters_grow_by_the_same_number_with_each_layer() -> None:
    counts = [recorded().with_layers(layers).num_parameters for layers in (6, 40)]
    # By hand: query and output, key and value of half the heads, the three matrices of the MLP, and two norms.
    assert counts[1] - counts[0] == 34 * (128 * 128 * 3 + 3 * 128 * 256 + 2 * 128)
    setup = _setup({"api": "fsdp2", "world_size": 8})
    memory = [memory_of(recorded().with_layers(n), setup, OBSERVED).peak_allocated_bytes for n in (20, 30, 40)]
    assert memory[2] - memory[1] == memory[1] - memory[0] > 0


@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [
        ({"loss": "chunked"}, "cuda", "your own model's is not replaced by another kind"),
        ({"wrap": "block-and-ends"}, "cuda", "of this model it is not known which modules those are"),
        ({}, "cpu", "on a CPU measure it"),
    ],
)
def test_setups_outside_of_the_recording_are_refused(fields: dict[str, object], device: str, expected: str) -> None:
    assert expected in str(why_impossible(recorded(), _setup({"api": "fsdp2", "world_size": 8, **fields}), device))


def test_flops_are_those_of_the_benchmark_model() -> None:
    """By hand: two for each weight and token, causal attention over half of the sequence, three times with backward."""
    matrices = 2 * (128 * 128 * 3 + 3 * 128 * 256)
    attention = 4 * 128 * (96 + 1) / 2
    assert recorded().with_layers(6).model_flops_per_token(96) == 3 * (6 * (matrices + attention) + 2 * 128 * 500)


def test_a_model_that_returns_a_bare_loss_is_recorded() -> None:
    """In its own process, as the command records, and with every variant. Expected: six nn.Linear(32, 32)."""
    model = recorded_model(record(RecordingSpec(module=user_module("bare_loss"))), "bare")
    assert model.num_parameters == 6 * (32 * 32 + 32)


def test_code_whose_shapes_depend_on_data_is_refused() -> None:
    with pytest.raises(SpecError, match="depend on data"):
        record_here(of_module, user_module("depends_on_data"))


def test_a_loop_over_the_sequence_is_refused_with_the_option_that_helps() -> None:
    with pytest.raises(SpecError, match="--fixed-length records it for one length"):
        record_here(of_module, LOOP)


def test_a_length_that_is_not_the_recorded_one_is_refused() -> None:
    with pytest.raises(SpecError, match=f"recorded for {LENGTH} tokens; record it with --seq 192 --fixed-length"):
        memory_of(looping(), TrainSetup(world_size=4, sequence_length=192))
    assert (looping().shortest_sequence, looping().longest_sequence) == (LENGTH, LENGTH)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"api": "fsdp2"}, marks=pytest.mark.slow),
        {"api": "fsdp1", "micro_batch_size": 4, "checkpointing": "full"},
        {"api": "fsdp2", "micro_batch_size": 7, "checkpointing": "selective"},
    ],
)
def test_phases_at_the_recorded_length_equal_the_dry_run(fields: dict[str, object]) -> None:
    setup = _setup({"world_size": 4, "precision": "fp32", **fields})
    assert_recorded_equals_dry_runs(looping(), DryRunSpec(setup=setup, module=LOOP))


CHECKPOINTING: list[dict[str, object]] = [
    {},
    {"checkpointing": "full"},
    {"checkpointing": "selective"},
    {"checkpointing": "selective", "checkpointing_policy": "aten.bmm"},
    {"checkpointing": "selective", "checkpointing_policy": "aten.add"},
]


def _unfused(checkpointing: dict[str, object]) -> TrainSetup:
    return _setup({"world_size": 8, "sequence_length": 192, "precision": "fp32", **checkpointing})


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_phases_with_unfused_attention_equal_the_dry_run(checkpointing: dict[str, object]) -> None:
    assert_recorded_equals_dry_runs(grouped(), DryRunSpec(setup=_unfused(checkpointing), module=GROUPED))


def from_the_catalog() -> RecordedModel:
    """Return a model whose recording has an addition that makes a tensor."""
    return shapes.recorded("OLMo-3-32B", 192, num_hidden_layers=8)


@pytest.mark.parametrize("model", [grouped, from_the_catalog])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING[:3])
def test_the_sum_with_the_mask_takes_memory_only_under_selective_checkpointing(
    model: Callable[[], RecordedModel], checkpointing: dict[str, object]
) -> None:
    log = SimulatedSteps(model(), _unfused(checkpointing), OBSERVED).first_steps()
    made = [(e.label, e.num_bytes) for e in log.events if e.kind is Kind.ALLOCATE]
    num_bytes = max(size for label, size in made if label == "aten::_safe_softmax")
    assert (("aten::add", num_bytes) in made) == (checkpointing.get("checkpointing") == "selective")
