"""Setups whose compiled blocks are predicted, and the tensors that these save."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import model, models
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.operators.kernels import CPU, CUDA, CUDA_OBSERVED
from fsdp_bench.spec.recording.compiled import huggingface_block, parts_of_both_ways, regime_of, splits_of_sum
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, Precision, ShardingStrategy, TrainSetup, Wrap
from tests.predicted import estimate_of, memory_of

LLAMA = model("Llama-3.1-8B").shape()
SETUP = TrainSetup(
    world_size=8, sequence_length=4096, micro_batch_size=2, compile=True, precision=Precision.parse("bf16-mixed")
)


def model_of(name: str, length: int) -> RecordedModel:
    """Return a model of the catalogue in Hugging Face's code."""
    entry = next(entry for entry in models() if entry.name == name)
    return recorded_architecture(entry.hf_config(), length, name)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"api": Api.FSDP2, "strategy": ShardingStrategy.NO_SHARD}, "DistributedDataParallel"),
        ({"wrap": Wrap.SIZE}, "units may be inside"),
        ({"checkpointing": Checkpointing.SELECTIVE, "checkpointing_policy": "aten.silu"}, "not recorded"),
    ],
)
def test_setups_without_compiled_predictions_have_a_reason(change: dict[str, object], part: str) -> None:
    assert part in (why_eager(LLAMA, replace(SETUP, **change), CUDA) or "")


def test_a_model_without_fsdp_on_one_gpu_is_predicted_as_compiled() -> None:
    alone = replace(SETUP, api=Api.FSDP2, strategy=ShardingStrategy.NO_SHARD, world_size=1)
    assert why_eager(LLAMA, alone, CUDA) is None


def test_the_compiled_loss_is_predicted_on_cuda_alone() -> None:
    assert why_eager(LLAMA, replace(SETUP, loss=Loss.COMPILED), CUDA) is None
    assert "compiled loss" in (why_eager(LLAMA, replace(SETUP, compile=False, loss=Loss.COMPILED), CPU) or "")


def test_sizes_that_inductor_pads_and_other_kernels_are_not_covered() -> None:
    odd = replace(LLAMA, intermediate_size=14335)
    assert "multiples of 64" in (why_eager(odd, SETUP, CUDA) or "")
    assert "CUDA alone" in (why_eager(LLAMA, SETUP, CPU) or "")
    assert "CUDA alone" in (why_eager(LLAMA, SETUP, CUDA_OBSERVED) or "")


def test_covered_setups_are_predicted_as_compiled() -> None:
    assert why_eager(LLAMA, SETUP, CUDA) is None
    assert why_eager(LLAMA, replace(SETUP, compile=False), CUDA) is None
    assert not estimate_of(LLAMA, SETUP).for_eager


QWEN = model_of("Qwen2.5-7B", 4096)


@pytest.mark.parametrize(
    ("named", "change", "part"),
    [
        ("SmolLM3-3B", {}, "models whose blocks are all alike, which SmolLM3-3B's are not"),
        ("Mixtral-8x7B", {}, "compiled blocks of MixtralForCausalLM are not recorded"),
        ("Mistral-7B-v0.1", {}, "blocks with a mask, beyond a sliding window"),
        ("Qwen2.5-7B", {"precision": Precision.parse("fp32")}, "in 32 bits with checkpointing none, for 8192 tokens"),
        ("Qwen2.5-7B", {"wrap": Wrap.SIZE}, "units may be inside"),
    ],
)
def test_some_blocks_of_hugging_face_are_predicted_in_eager(named: str, change: dict[str, object], part: str) -> None:
    assert part in (why_eager(model_of(named, 4096), replace(SETUP, **change), CUDA) or "")


@pytest.mark.parametrize("named", ["Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B", "Mistral-7B-v0.3", "Phi-4", "OLMo-2-7B"])
@pytest.mark.parametrize("batch", [1, 2])
def test_dense_decoders_of_hugging_face_are_compiled(named: str, batch: int) -> None:
    assert why_eager(model_of(named, 4096), replace(SETUP, micro_batch_size=batch), CUDA) is None


def test_a_tied_head_is_no_other_block() -> None:
    tied = model_of("Qwen2.5-0.5B", 4096)
    assert QWEN.code.architecture is not None
    assert tied.code.architecture is not None
    assert QWEN.code.architecture.settings != tied.code.architecture.settings
    assert huggingface_block(QWEN.code.architecture) == huggingface_block(tied.code.architecture)


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_compiled_blocks_of_hugging_face_save_less_too(api: Api, checkpointing: Checkpointing) -> None:
    setup = replace(SETUP, api=api, checkpointing=checkpointing)
    peaks = {
        (compiles, layers): memory_of(QWEN.with_layers(layers), replace(setup, compile=compiles), CUDA).phases[
            "forward"
        ]
        for compiles, layers in product((False, True), (16, 17))
    }
    eager, compiled = (peaks[compiles, 17] - peaks[compiles, 16] for compiles in (False, True))
    assert compiled < eager if checkpointing is Checkpointing.NONE else compiled == eager


@pytest.mark.parametrize(
    ("api", "checkpointing"), list(product((Api.FSDP1, Api.FSDP2), (Checkpointing.NONE, Checkpointing.FULL)))
)
def test_compiled_blocks_save_less_and_depth_adds_what_a_block_saves(api: Api, checkpointing: Checkpointing) -> None:
    """Without checkpointing the partitioner saves less than eager; with it the inputs of a block, as eager does."""
    setup = replace(SETUP, api=api, checkpointing=checkpointing)
    peaks = {}
    for compiles, layers in product((False, True), (16, 17)):
        shape = replace(LLAMA, num_hidden_layers=layers)
        peaks[compiles, layers] = memory_of(shape, replace(setup, compile=compiles), CUDA).phases["forward"]
    eager, compiled = (peaks[compiles, 17] - peaks[compiles, 16] for compiles in (False, True))
    assert compiled < eager if checkpointing is Checkpointing.NONE else compiled == eager


def test_one_block_stands_for_others_as_every_block_does() -> None:
    setup = replace(SETUP, strategy=ShardingStrategy.FULL_SHARD, api=Api.FSDP2)
    peaks = [memory_of(replace(LLAMA, num_hidden_layers=n), setup).peak_allocated_bytes for n in (4, 12, 20)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1]


def test_sums_are_split_as_inductor_splits_them() -> None:
    """On 132 multiprocessors of 2048 threads; read from code that torch 2.13 wrote for an H200."""
    assert splits_of_sum(4096, 512, 132, 2048) == 32
    assert parts_of_both_ways(4096, 132) == 256
    assert parts_of_both_ways(16384, 132) == 1024
    assert (regime_of(16384, 512), regime_of(4096, 512), regime_of(4096, 4096)) == (
        "both ways",
        "more tokens",
        "few tokens",
    )
