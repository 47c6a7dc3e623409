"""Units and adapters that PyTorch does not train, or that are not predicted: refused in one line, with what works."""

from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.models.build import build, few_blocks
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU
from fsdp_bench.simulate.recorded.model import RecordedModule
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.simulate.wrappers.units import choose_units
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Api, Precision, TrainSetup
from tests.conftest import refused
from tests.shapes import recorded, shape

MODEL = shape(
    **{"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 24, "vocab_size": 31, "max_position_embeddings": 16},
)
FAILS: dict[str, Any] = {"api": "fsdp2", "wrap": "size", "min_num_params": 200, "checkpointing": "selective"}
FAILS |= {"world_size": 2}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"api": "fsdp1", "limit_all_gathers": True},
        {"api": "fsdp1", "limit_all_gathers": False, "forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
        {"api": "fsdp1", "limit_all_gathers": False, "offload": "params", "use_orig_params": True},
    ],
)
def test_a_block_with_units_inside_is_refused_with_what_would_work(change: dict[str, Any]) -> None:
    """FSDP1's drawn by tools.validate --seed 20261123, dry run and rehearsal: torch: "not found in storage"."""
    reason = why_impossible(MODEL, TrainSetup(**{**FAILS, **change}), "cuda")
    assert "min_num_params" in str(reason)
    assert "\n" not in str(reason)


@pytest.mark.parametrize(
    "change",
    [
        {"wrap": "block"},
        {"min_num_params": MODEL.num_block_parameters},
        {"checkpointing": "full"},
        {"strategy": "NO_SHARD"},
        {"api": "fsdp1", "limit_all_gathers": False},
        {"api": "fsdp1", "limit_all_gathers": False, "forward_prefetch": True},
        {"api": "fsdp1", "limit_all_gathers": False, "offload": "params", "use_orig_params": False},
    ],
)
def test_the_alternatives_that_a_refusal_names_are_not_refused(change: dict[str, Any]) -> None:
    assert why_impossible(MODEL, TrainSetup(**{**FAILS, **change}), "cuda") is None


WORDS = ("--world-size", 2, "--gpu", "A100-SXM-80GB", "--api", "fsdp2", "--wrap", "size", "--min-num-params", "10k")
WORDS = (*WORDS, "--checkpointing", "selective")


@pytest.mark.parametrize("command", ["predict", "dry-run"])
def test_commands_refuse_it_in_one_line(command: str) -> None:
    assert "profiler annotations" in refused(command, "--params", "10M", *WORDS)


def test_a_tied_head_keeps_both_ends_in_the_root() -> None:
    """FSDPState._validate_no_duplicate_params: a shared parameter is in one unit."""
    setup, tied = TrainSetup(wrap="block-and-ends"), replace(MODEL, tie_word_embeddings=True)
    assert why_impossible(MODEL, setup, "cuda") is None
    assert "tie_word_embeddings" in (why_impossible(tied, setup, "cuda") or "")
    ddp = replace(setup, api="fsdp2", strategy="NO_SHARD")
    assert why_impossible(tied, ddp, "cuda") is None  # DistributedDataParallel has no units


# -- Units of a recorded model by size ---------------------------------------------------------------------------------


def setup(**fields: Any) -> TrainSetup:
    return TrainSetup(**{"world_size": 8, "sequence_length": 512, "precision": "bf16-mixed", "wrap": "size", **fields})


def units(shape: RecordedModel, setup: TrainSetup, is_whole: bool) -> set[str]:
    """Return the units' names without the blocks' numbers."""
    op = Operators(Tape(), CPU)
    made = build(op, shape, setup, shape.num_blocks) if is_whole else few_blocks(op, shape, setup)
    modules = [module for unit in choose_units(made, setup) for module in unit.modules]
    names = [module.name for module in modules if isinstance(module, RecordedModule)]
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in names}


@pytest.mark.parametrize("least", [10**6, 3 * 10**7, 2 * 10**8])
def test_a_block_that_stands_for_others_has_the_units_of_one(least: int) -> None:
    """Llama-3.1-8B: a block has 218 million parameters, a matrix of its MLP 59 million."""
    shape, sized = recorded("Llama-3.1-8B"), setup(min_num_params=least)
    assert units(shape, sized, is_whole=False) == units(shape, sized, is_whole=True)
    assert ("model.layers" in units(shape, sized, is_whole=True)) is (least == 2 * 10**8)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("Qwen2.5-0.5B", {"api": "fsdp2", "min_num_params": 10**6}, "model.embed_tokens.weight"),
        ("gpt2", {"api": "fsdp1", "min_num_params": 10**6}, "transformer.wte.weight"),
        ("DeepSeek-V2-Lite", {"api": "fsdp2", "min_num_params": 1000}, "casts its inputs"),
        ("ViT-B-16", {"api": "fsdp1", "min_num_params": 10**6, "sequence_length": 197}, "model of images"),
        ("gpt2", {"api": "fsdp2", "strategy": "NO_SHARD", "min_num_params": 1}, "None"),  # DDP has no units
    ],
)
def test_units_that_do_not_train_or_were_not_recorded_are_refused(name: str, fields: dict[str, Any], said: str) -> None:
    reason = why_impossible(recorded(name), setup(**fields), "cuda")
    assert said in str(reason)


# -- Adapters ----------------------------------------------------------------------------------------------------------


def adapted(name: str, lora: LoRA, adapter: str) -> RecordedModel:
    """Return a recorded model whose weights are stored in bf16, as if it had been recorded with an adapter."""
    found = recorded(name)
    frozen = [replace(each, dtype="bf16") for each in found.code.parameters]
    code = replace(
        found.code,
        parameters=(*frozen, replace(frozen[0], name=adapter, dtype="")),
        origin=replace(found.code.origin, lora=lora),
    )
    return replace(found, code=code)


def reason(shape: RecordedModel, api: Api, precision: str) -> str:
    setup = TrainSetup(world_size=8, sequence_length=512, api=api, precision=Precision.parse(precision))
    return why_impossible(shape, setup, "cuda") or ""


ADAPTER = "model.layers.0.mlp.gate.lora_A.default.weight"


@pytest.mark.parametrize("precision", ["bf16/fp32/bf16", "fp16-mixed"])
def test_packed_weights_are_computed_with_in_bf16_alone(precision: str) -> None:
    shape = adapted("Llama-3.1-8B", LoRA(base="nf4"), ADAPTER)
    assert "compute in bf16" in reason(shape, Api.FSDP2, precision)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Mixtral-8x7B"])
def test_frozen_weights_that_wrappers_would_cast_to_fp32_are_refused(name: str) -> None:
    """Without a policy that casts they are computed with as they are stored."""
    shape = adapted(name, LoRA(base="bf16"), ADAPTER)
    assert "would cast them to fp32" in reason(shape, Api.FSDP2, "fp32/fp32/bf16")
    assert reason(shape, Api.FSDP2, "fp32") == ""


def test_adapters_of_experts_need_fsdp2() -> None:
    shape = adapted("Mixtral-8x7B", LoRA(base="bf16"), "model.layers.0.mlp.experts.base_layer.lora_A.default.weight")
    assert "use fsdp2" in reason(shape, Api.FSDP1, "bf16-true")
