"""Recordings of transformers' code against dry runs of it: adapters, frozen parameters, other kinds of attention."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import PREFETCHED_ADAPTERS
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.train.recording.main import huggingface, of_module
from tests.on_stand_in.simulate.frozen_models import CONFIG as LLAMA
from tests.on_stand_in.simulate.frozen_models import FROZEN
from tests.shapes import estimate_of, memory_of
from tests.simulate.comparing import OBSERVED, assert_recorded_equals_dry_runs
from tests.simulate.recorded.recording import record_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # each recording takes half a minute or a whole one

CONFIG = LLAMA | {"num_hidden_layers": 7}
ADAPTERS = {
    "lora": LoRA(rank=4, targets=("all-linear",), dropout=0.1),
    "lora-bf16": LoRA(rank=4, base="bf16"),
    "qlora": LoRA(rank=4, base="nf4"),
}
ATTENTION = ("eager", "flash_attention_2")
MODULE = UserModule(
    function="frozen_models:make",
    block="transformers.models.llama.modeling_llama:LlamaDecoderLayer",
    folder=str(Path(__file__).parent),
)
PARTS = ["embed_tokens layers.0. layers.1.", "embed_tokens norm lm_head"]
"""Frozen: whole blocks, and the rest of both; blocks of both, and nothing trained in the rest."""
SUBJECTS: dict[str, dict[str, Any]] = {
    **{name: {"config": CONFIG, "lora": lora} for name, lora in ADAPTERS.items()},
    **{name: {"config": LLAMA | {"attn_implementation": name}} for name in ATTENTION},
    **{parts: {"module": MODULE} for parts in PARTS},
}
"""Fields of a DryRunSpec that say which code runs."""

INSIDE, AROUND = ({"checkpointing": "full", "reentrant": kind} for kind in ("inside", "around"))
APART = {"wrap": "block-and-adapters"}
OF_ATTENTION: list[dict[str, Any]] = [
    {"api": "fsdp1", "world_size": 4},
    {"api": "fsdp2", "world_size": 4, "checkpointing": "full"},
    # softmax from fp16 computes in fp32 without a copy of the scores
    {"api": "fsdp1", "world_size": 4, "precision": "fp16-mixed"},
]
ACCUMULATED = {"gradient_accumulation_steps": 3, "sync_every_micro_batch": False, "max_grad_norm": 1.0}
OF_FROZEN: list[dict[str, Any]] = [
    {"api": "fsdp1", "world_size": 4},
    {"api": "fsdp1", "world_size": 2, "strategy": "SHARD_GRAD_OP", "precision": "fp32", **ACCUMULATED},
    {"api": "fsdp1", "world_size": 8, "checkpointing": "full", "backward_prefetch": "BACKWARD_POST"},
    {"api": "fsdp1", "world_size": 4, "wrap": "none", "micro_batch_size": 1},
    {"api": "fsdp2", "world_size": 4, "gradient_accumulation_steps": 2, "precision": "fp32"},
    {"api": "fsdp2", "world_size": 4, "checkpointing": "selective"},
    {"api": "fsdp2", "world_size": 4, "strategy": "NO_SHARD"},
]
SETUPS: dict[str, list[dict[str, Any]]] = {
    "lora": [
        {"api": "fsdp1", "world_size": 4, "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 512, "strategy": "SHARD_GRAD_OP", "precision": "bf16-true"},
        {"api": "fsdp1", "world_size": 8, **APART, "use_orig_params": False},
        {"api": "fsdp2", "world_size": 64, "strategy": "HYBRID_SHARD", "shard_size": 8, "offload": "params"},
        {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 4, "gradient_accumulation_steps": 2, **INSIDE},
        {"api": "fsdp1", "world_size": 4, "strategy": "SHARD_GRAD_OP", "loss": "chunked", **AROUND},
    ],
    "lora-bf16": [
        {"api": "fsdp1", "world_size": 4, **APART, "checkpointing": "full"},
        {"api": "fsdp2", "world_size": 4, "offload": "params", "gradient_accumulation_steps": 2},
        {"api": "fsdp2", "world_size": 4, "strategy": "NO_SHARD"},
        {"api": "fsdp1", "world_size": 1, **APART, **AROUND},
        {"api": "fsdp2", "world_size": 1, "strategy": "NO_SHARD", **INSIDE},
        {"api": "fsdp1", "world_size": 4, **APART, "loss": "chunked", **AROUND},
        {"api": "fsdp1", "world_size": 4, **APART, **INSIDE},
        {"api": "fsdp2", "world_size": 4, **AROUND},
        {"api": "fsdp2", "world_size": 4, "loss": "chunked", **INSIDE},
    ],
    "qlora": [
        {"api": "fsdp1", "world_size": 4, **APART, "checkpointing": "full"},
        {"api": "fsdp1", "world_size": 2, "precision": "bf16-true", "checkpointing": "selective"},
        {"api": "fsdp2", "world_size": 64, "strategy": "SHARD_GRAD_OP", "max_grad_norm": 1.0},
        {"api": "fsdp2", "world_size": 8, "strategy": "NO_SHARD", "checkpointing": "full", "loss": "chunked"},
        {"api": "fsdp1", "world_size": 4, **APART, **AROUND},
        {"api": "fsdp2", "world_size": 8, **INSIDE},
    ],
    **dict.fromkeys(ATTENTION, OF_ATTENTION),
    **dict.fromkeys(PARTS, OF_FROZEN),
}
VARIANTS = (
    *("bf16", "bf16 autocast", "bf16 cast at blocks", "bf16 flat units", "bf16-true", "bf16-true flat units"),
    *("bf16 adapters apart", "bf16 adapters apart as gathered"),
)
"""The variants of a recording that the setups of adapters use. All variants take a minute more."""


def _setup(fields: dict[str, Any]) -> TrainSetup:
    return TrainSetup(**{"precision": "bf16-mixed", "sequence_length": 96, "micro_batch_size": 2, **fields})


def _spec(which: str, setup: TrainSetup, **given: Any) -> DryRunSpec:
    return DryRunSpec(setup=setup, **SUBJECTS[which], **given)


@pytest.fixture(scope="module", params=SUBJECTS)
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def recorded(which: str) -> Iterator[RecordedModel]:
    """A recording. The environment names the model with frozen parameters, which dry runs build, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FROZEN, which)
        if which in PARTS:
            yield record_here(of_module, MODULE)
        elif which in ADAPTERS:
            yield record_here(huggingface, CONFIG, 128, ADAPTERS[which], variants=VARIANTS)
        else:
            yield record_here(huggingface, SUBJECTS[which]["config"], 128, variants=(*VARIANTS[:3], "fp16"))


def test_every_phase_equals_the_dry_run(which: str, recorded: RecordedModel) -> None:
    setups = [_setup(fields) for fields in SETUPS[which]]
    assert [why_impossible(recorded, setup, "cuda") for setup in setups] == [None] * len(setups)
    ranks = [memory_of(recorded, setup, OBSERVED).peak_rank for setup in setups]
    specs = [_spec(which, setup, rank=rank) for setup, rank in zip(setups, ranks, strict=True)]
    assert_recorded_equals_dry_runs(recorded, *specs)


@pytest.mark.parametrize("which", ADAPTERS, indirect=True)
def test_trained_and_frozen_parameters_are_counted(which: str, recorded: RecordedModel) -> None:
    """A 4-bit weight counts as many parameters as it has values. By hand from the shapes in CONFIG."""
    rank, hidden, inside, kv = 4, 64, 96, 32
    frozen = 2 * 200 * hidden + hidden + 7 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inside + 2 * hidden)
    trained = 7 * rank * ((hidden + hidden) + (hidden + kv))
    if which == "lora":  # also k_proj, o_proj and the three of the MLP
        trained += 7 * rank * ((hidden + kv) + (hidden + hidden) + 3 * (hidden + inside))
    assert recorded.num_trained_parameters == trained
    assert recorded.num_parameters == frozen + trained


@pytest.mark.parametrize(
    ("which", "use_orig_params", "refused"),
    [
        *(("lora", True, None), ("lora-bf16", True, "uniform dtype"), ("qlora", True, "uniform dtype")),
        *((parts, False, "uniform `requires_grad`") for parts in PARTS),
    ],
    indirect=["which"],
)
def test_setups_that_torch_refuses_are_refused(
    which: str, use_orig_params: bool, refused: str | None, recorded: RecordedModel
) -> None:
    setup = _setup({"api": "fsdp1", "world_size": 4, "use_orig_params": use_orig_params})
    reason = why_impossible(recorded, setup, "cuda")
    [(_, answer)] = dry_runs([_spec(which, setup, kernels="cuda")])
    assert (reason is None) == (answer.result is not None)
    assert which in PARTS or (reason is None) == (refused is None)
    assert reason is None or (str(refused) in reason and (which in PARTS or str(refused) in str(answer.error)))


@pytest.mark.parametrize("which", ["lora-bf16"], indirect=True)
def test_prefetching_of_adapters_is_refused(which: str, recorded: RecordedModel) -> None:
    fields = {"api": "fsdp1", "world_size": 4, **APART, "use_orig_params": False}
    assert why_impossible(recorded, _setup(fields), "cuda") is None
    assert why_impossible(recorded, _setup({**fields, "forward_prefetch": True}), "cuda") == PREFETCHED_ADAPTERS


def test_an_unknown_target_of_adapters_is_refused_in_one_line() -> None:
    with pytest.raises(SpecError, match="lora: PEFT refuses it: Target modules") as caught:
        record_here(huggingface, CONFIG, 128, LoRA(targets=("nowhere",)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("which", "fused", "fits_on", "refused_on"),
    [("eager", False, "V100-SXM2-16GB", None), ("flash_attention_2", True, "A100-SXM-40GB", "T4")],
    indirect=["which"],
)
def test_a_gpu_has_a_verdict_or_is_refused(
    which: str, fused: bool, fits_on: str, refused_on: str | None, recorded: RecordedModel
) -> None:
    assert recorded.document()["attention"] == which
    assert recorded.has_flash_attn if fused else not recorded.has_fused_attention
    assert not fused or not recorded.code.missing
    setup = _setup({"world_size": 4})
    assert estimate_of(recorded, setup, Hardware.of_gpu(gpu(fits_on))).verdict is Verdict.FITS
    if refused_on is not None:
        with pytest.raises(SpecError, match=r"T4 has 7\.5; the flash-attn package needs compute capability 8\.0"):
            estimate_of(recorded, setup, Hardware.of_gpu(gpu(refused_on)))
