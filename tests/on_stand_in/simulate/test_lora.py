"""Recorded models with LoRA and QLoRA, against dry runs of PEFT's and bitsandbytes' modules."""

from __future__ import annotations

import pytest

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.impossible import PREFETCHED_ADAPTERS
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.train.recording.main import huggingface
from tests.on_stand_in.simulate.frozen_models import CONFIG as LLAMA
from tests.predicted import memory_of
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here

pytestmark = [  # each recording takes a minute
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

CONFIG = LLAMA | {"num_hidden_layers": 7}
VARIANTS = (
    *("bf16", "bf16 autocast", "bf16 cast at blocks", "bf16 flat units", "bf16-true", "bf16-true flat units"),
    *("bf16 adapters apart", "bf16 adapters apart as gathered"),
)
"""The variants of a recording that the setups below use. All variants take a minute more."""

ADAPTERS = {
    "lora": LoRA(rank=4, targets=("all-linear",), dropout=0.1),
    "lora-bf16": LoRA(rank=4, base="bf16"),
    "qlora": LoRA(rank=4, base="nf4"),
}
INSIDE, AROUND = ({"checkpointing": "full", "reentrant": kind} for kind in ("inside", "around"))
SETUPS = {
    "lora": [
        {"api": "fsdp1", "world_size": 4, "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 512, "strategy": "SHARD_GRAD_OP", "precision": "bf16-true"},
        {"api": "fsdp1", "world_size": 8, "wrap": "block-and-adapters", "use_orig_params": False},
        {"api": "fsdp2", "world_size": 64, "strategy": "HYBRID_SHARD", "shard_size": 8, "offload": "params"},
        {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 4, "gradient_accumulation_steps": 2, **INSIDE},
        {"api": "fsdp1", "world_size": 4, "strategy": "SHARD_GRAD_OP", "loss": "chunked", **AROUND},
    ],
    "lora-bf16": [
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "checkpointing": "full"},
        {"api": "fsdp2", "world_size": 4, "offload": "params", "gradient_accumulation_steps": 2},
        {"api": "fsdp2", "world_size": 4, "strategy": "NO_SHARD"},
        {"api": "fsdp1", "world_size": 1, "wrap": "block-and-adapters", **AROUND},
        {"api": "fsdp2", "world_size": 1, "strategy": "NO_SHARD", **INSIDE},
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "loss": "chunked", **AROUND},
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", **INSIDE},
        {"api": "fsdp2", "world_size": 4, **AROUND},
        {"api": "fsdp2", "world_size": 4, "loss": "chunked", **INSIDE},
    ],
    "qlora": [
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 2, "precision": "bf16-true", "checkpointing": "selective"},
        {"api": "fsdp2", "world_size": 64, "strategy": "SHARD_GRAD_OP", "max_grad_norm": 1.0},
        {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full", "loss": "chunked"},
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", **AROUND},
        {"api": "fsdp2", "world_size": 8, **INSIDE},
    ],
}


def _setup(fields: dict[str, object]) -> TrainSetup:
    usual = {"precision": "bf16-mixed", "sequence_length": 96, "micro_batch_size": 2}
    return TrainSetup(**{**usual, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=ADAPTERS)
def which(request: pytest.FixtureRequest) -> str:
    if ADAPTERS[request.param].is_quantized:
        pytest.importorskip("bitsandbytes", reason="QLoRA is bitsandbytes'")
    return str(request.param)


@pytest.fixture(scope="module")
def recorded(which: str) -> RecordedModel:
    return record_here(huggingface, CONFIG, 128, ADAPTERS[which], variants=VARIANTS)


def test_every_phase_equals_the_dry_run(which: str, recorded: RecordedModel) -> None:
    setups = [_setup(fields) for fields in SETUPS[which]]
    assert [why_impossible(recorded, setup, "cuda") for setup in setups] == [None] * len(setups)
    ranks = [memory_of(recorded, setup, OBSERVED).peak_rank for setup in setups]
    specs = [
        DryRunSpec(setup=setup, config=CONFIG, lora=ADAPTERS[which], rank=rank)
        for setup, rank in zip(setups, ranks, strict=True)
    ]
    assert_recorded_equals_dry_runs(recorded, *specs)


def test_trained_and_frozen_parameters_are_counted(which: str, recorded: RecordedModel) -> None:
    """A 4-bit weight counts as many parameters as it has values. By hand from the shapes in CONFIG."""
    rank, hidden, inside, kv = 4, 64, 96, 32
    frozen = 2 * 200 * hidden + hidden + 7 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inside + 2 * hidden)
    trained = 7 * rank * ((hidden + hidden) + (hidden + kv))
    if which == "lora":  # also k_proj, o_proj and the three of the MLP
        trained += 7 * rank * ((hidden + kv) + (hidden + hidden) + 3 * (hidden + inside))
    assert recorded.num_trained_parameters == trained
    assert recorded.num_parameters == frozen + trained


def test_setups_that_torch_refuses_are_refused(which: str, recorded: RecordedModel) -> None:
    setup = _setup({"api": "fsdp1", "world_size": 4, "use_orig_params": True})
    reason = why_impossible(recorded, setup, "cuda")
    [(_, answer)] = dry_runs([DryRunSpec(setup=setup, config=CONFIG, lora=ADAPTERS[which])])
    assert (reason is None) == (answer.result is not None) == (which == "lora")
    assert reason is None or ("uniform dtype" in reason and "uniform dtype" in str(answer.error))


def test_prefetching_of_adapters_is_refused(which: str, recorded: RecordedModel) -> None:
    fields = {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "use_orig_params": False}
    assert why_impossible(recorded, _setup(fields), "cuda") is None
    assert why_impossible(recorded, _setup({**fields, "forward_prefetch": True}), "cuda") == PREFETCHED_ADAPTERS


def test_an_unknown_target_of_adapters_is_refused_in_one_line() -> None:
    with pytest.raises(SpecError, match="lora: PEFT refuses it: Target modules") as caught:
        record_here(huggingface, CONFIG, 128, LoRA(targets=("nowhere",)))
    assert "\n" not in str(caught.value)
