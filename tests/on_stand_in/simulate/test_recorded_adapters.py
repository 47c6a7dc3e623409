"""Recordings with adapters that come with fsdp-bench: the same predictions as those that are made on demand."""

from typing import Any

import pytest

from fsdp_bench.catalog.architectures import ADAPTERS, USUAL, folder_of, recorded_architecture
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.lora import LoRA
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.train.recording.main import huggingface
from tests.shapes import llama_config, memory_of
from tests.simulate.recorded.recording import record_here

CONFIG = llama_config(hidden_size=256, intermediate_size=640, num_hidden_layers=7, vocab_size=1000)
ONE_GPU: list[dict[str, Any]] = [{"world_size": 1, "api": "fsdp2", "strategy": "NO_SHARD"}]
SHARDED: list[dict[str, Any]] = [
    {"world_size": 1, "api": "fsdp2", "strategy": "FULL_SHARD"},
    {"world_size": 8, "api": "fsdp2", "strategy": "FULL_SHARD"},
    {"world_size": 8, "api": "fsdp2", "strategy": "NO_SHARD"},
    {"world_size": 8, "api": "fsdp2", "offload": "params", "precision": "bf16-true"},
    {"world_size": 8, "api": "fsdp1", "wrap": "block-and-adapters"},
    {"world_size": 8, "api": "fsdp1", "wrap": "block-and-adapters", "use_orig_params": False},
    {"world_size": 8, "api": "fsdp1", "precision": "bf16-true"},
    {"world_size": 8, "api": "fsdp1", "precision": "bf16-true", "wrap": "none"},
]
BATCHES = ((1, 96), (3, 160), (2, 4096))
"""Sequences, and their tokens."""


def _compare(lora: LoRA, places: list[dict[str, Any]], variants: tuple[str, ...] | None = None) -> int:
    """Compare the two recordings in all setups that can run; return how many these were."""
    ours = recorded_architecture(CONFIG, 128, "Llama", ADAPTERS, lora)
    own = record_here(huggingface, CONFIG, 128, lora, variants=variants)
    compared = 0
    for place in places:
        for checkpointing in ("none", "full", "selective"):
            for batch, length in BATCHES:
                sizes = {"micro_batch_size": batch, "sequence_length": length, "checkpointing": checkpointing}
                setup = TrainSetup(**{"precision": "bf16-mixed", **sizes, **place})
                reasons = [why_impossible(model, setup, "cuda") for model in (ours, own)]
                assert reasons[0] == reasons[1]
                if reasons[0] is None:
                    assert memory_of(ours, setup, CUDA) == memory_of(own, setup, CUDA), setup
                    compared += 1
    return compared


@pytest.mark.timeout(600)
def test_predictions_equal_those_of_a_recording_on_demand() -> None:
    """To the byte in every phase, and of the same operators at the peak."""
    assert _compare(LoRA(rank=12, base="bf16"), ONE_GPU, ("bf16 autocast",)) == 9


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", [5, 64])
@pytest.mark.parametrize("usual", USUAL, ids=lambda usual: folder_of(usual).name)
def test_every_usual_kind_of_adapters_equals_a_recording_on_demand(usual: LoRA, rank: int) -> None:
    lora = LoRA(rank=rank, targets=usual.targets, base=usual.base)
    assert _compare(lora, [*ONE_GPU, *SHARDED]) > 60
