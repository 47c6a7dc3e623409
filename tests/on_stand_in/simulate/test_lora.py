"""LoRA and QLoRA: the simulation against PyTorch's own wrappers around PEFT's and bitsandbytes' modules."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch", reason="a dry run needs torch")
pytest.importorskip("transformers", reason="the models are transformers'")
pytest.importorskip("peft", reason="LoRA is peft's")

from fsdp_bench.catalog.recorded import recorded_model
from fsdp_bench.plan.estimate import KERNELS, predict_memory
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import PREFETCHED_ADAPTERS, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.train.models.huggingface import unpacked_sequences
from fsdp_bench.train.models.quantized import as_on_cuda
from fsdp_bench.train.recording import record as recording
from fsdp_bench.train.recording.subjects import huggingface
from tests.on_stand_in.simulate.frozen_models import CONFIG as LLAMA

pytestmark = [  # each recording takes a minute
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

CONFIG = LLAMA | {"num_hidden_layers": 7}
KINDS = (
    *("bf16", "bf16 autocast", "bf16 cast at blocks", "bf16 flat units", "bf16-true flat units"),
    *("bf16 adapters apart", "bf16 adapters apart as gathered"),
)
"""What the setups below run; a whole recording takes a minute more."""

ADAPTERS = {
    "lora": LoRA(rank=4, targets=("all-linear",), dropout=0.1),
    "lora-bf16": LoRA(rank=4, base="bf16"),
    "qlora": LoRA(rank=4, base="nf4"),
}
SETUPS = {
    "lora": [
        {"api": "fsdp1", "world_size": 4, "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 512, "strategy": "SHARD_GRAD_OP", "precision": "bf16-true"},
        {"api": "fsdp1", "world_size": 8, "wrap": "block-and-adapters", "use_orig_params": False},
        {"api": "fsdp2", "world_size": 64, "strategy": "HYBRID_SHARD", "shard_size": 8, "offload": "params"},
        {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full"},
    ],
    "lora-bf16": [
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "checkpointing": "full"},
        {"api": "fsdp2", "world_size": 4, "offload": "params", "gradient_accumulation_steps": 2},
        {"api": "fsdp2", "world_size": 4, "strategy": "NO_SHARD"},
    ],
    "qlora": [
        {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 2, "precision": "bf16-true", "checkpointing": "selective"},
        {"api": "fsdp2", "world_size": 64, "strategy": "SHARD_GRAD_OP", "max_grad_norm": 1.0},
        {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full"},
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
    with pytest.MonkeyPatch.context() as patch:
        kinds = tuple(kind for kind in recording.KINDS_WITH_FROZEN if kind.name in KINDS)
        patch.setattr(recording, "KINDS_WITH_FROZEN", kinds)
        with unpacked_sequences(), as_on_cuda(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as train/recording/main.py: transformers' and peft's own
            code = recording.record(huggingface(CONFIG, 128, ADAPTERS[which]))
    return recorded_model(code, which)


def test_peaks_of_all_phases_are_those_of_the_dry_run(which: str, recorded: RecordedModel) -> None:
    setups = [_setup(fields) for fields in SETUPS[which]]
    assert [why_impossible(recorded, setup, "cuda") for setup in setups] == [None] * len(setups)
    predicted = [predict_memory(recorded, setup, KERNELS["cuda-observed"]) for setup in setups]
    specs = [
        DryRunSpec(setup=setup, config=CONFIG, lora=ADAPTERS[which], rank=one.peak_rank)
        for setup, one in zip(setups, predicted, strict=True)
    ]
    for index, answer in dry_runs(specs):
        assert answer.result is not None, answer.error
        phases = answer.result.phases
        assert {phase: predicted[index].phases[phase] for phase in phases} == phases, setups[index]


def test_parameters_are_those_of_the_model(which: str, recorded: RecordedModel) -> None:
    """Weights of 4 bits count as many parameters as they have numbers."""
    rank, hidden, inside, kv = 4, 64, 96, 32
    frozen = 2 * 200 * hidden + hidden + 7 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inside + 2 * hidden)
    trained = 7 * rank * ((hidden + hidden) + (hidden + kv))
    if which == "lora":  # also k_proj, o_proj and the three of the MLP
        trained += 7 * rank * ((hidden + kv) + (hidden + hidden) + 3 * (hidden + inside))
    assert recorded.num_trained_parameters == trained
    assert recorded.num_parameters == frozen + trained


def test_what_torch_refuses_is_refused(which: str, recorded: RecordedModel) -> None:
    setup = _setup({"api": "fsdp1", "world_size": 4, "use_orig_params": True})
    reason = why_impossible(recorded, setup, "cuda")
    [(_, answer)] = dry_runs([DryRunSpec(setup=setup, config=CONFIG, lora=ADAPTERS[which])])
    assert (reason is None) == (answer.result is not None) == (which == "lora")
    assert reason is None or ("uniform dtype" in reason and "uniform dtype" in str(answer.error))


def test_adapters_that_are_gathered_ahead_are_not_predicted(which: str, recorded: RecordedModel) -> None:
    fields = {"api": "fsdp1", "world_size": 4, "wrap": "block-and-adapters", "use_orig_params": False}
    assert why_impossible(recorded, _setup(fields), "cuda") is None
    assert why_impossible(recorded, _setup({**fields, "forward_prefetch": True}), "cuda") == PREFETCHED_ADAPTERS


def test_a_target_that_the_model_does_not_have_is_one_line() -> None:
    with pytest.raises(SpecError, match="lora: PEFT refuses it: Target modules") as caught:
        recording.record(huggingface(CONFIG, 128, LoRA(targets=("nowhere",))))
    assert "\n" not in str(caught.value)
