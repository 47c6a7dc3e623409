"""Adapters that PyTorch does not train are refused in one line, with what does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Api, Precision, TrainSetup
from tests.shapes import recorded


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
