"""Attention on a T4, for which torch has no FlashAttention: predicted peaks against rehearsals.

torch's build for CUDA 13 has no kernels for a V100, whose attention is chosen by the same rules. fp16 needs a gradient
scaler, which skips steps by values that the stand-in does not compute: tests/simulate/test_against_dry_run.py has it.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.catalog.architectures import BEFORE_SM80, recorded_architecture
from fsdp_bench.spec.setup import TrainSetup
from tests.shapes import llama_config, shape
from tests.simulate.comparing import against_rehearsals
from tools.validate.random_setups import Cell

LLAMA = llama_config(num_hidden_layers=3, hidden_size=256, intermediate_size=512, vocab_size=1000)
TIED = LLAMA | {"tie_word_embeddings": True}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 3, "vocab_size": 1000},
    **{"n_embd": 256, "n_head": 4, "n_positions": 512},
}
SHAPE = shape(hidden_size=256, num_key_value_heads=2, intermediate_size=512)


def _setup(precision: str, api: str, checkpointing: str) -> TrainSetup:
    given = {"precision": precision, "api": api, "checkpointing": checkpointing}
    return TrainSetup(world_size=4, micro_batch_size=2, sequence_length=256, **given)


def _of_hugging_face(config: dict[str, Any], setup: TrainSetup) -> Cell:
    model = recorded_architecture(config, setup.sequence_length, "small", BEFORE_SM80)
    return Cell(config=config, model=model, setup=setup)


def _assert_equal_peaks(cells: list[Cell]) -> None:
    for one in against_rehearsals(cells, "T4"):
        assert one.error is None, (one.label, one.error)
        assert one.peak.predicted_bytes == one.peak.reference_bytes, (one.label, one.phases)


def test_the_weights_of_all_heads_count_in_bf16() -> None:
    setup = _setup("bf16-mixed", "fsdp1", "none")
    _assert_equal_peaks([Cell(model=SHAPE, setup=setup), _of_hugging_face(TIED, setup)])


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, TIED, LLAMA | {"num_key_value_heads": 4}, MISTRAL, GPT2])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp32"])
def test_recorded_code_has_the_peaks_of_a_t4(config: dict[str, Any], precision: str) -> None:
    cells = [
        _of_hugging_face(config, _setup(precision, "fsdp1", "none")),
        _of_hugging_face(config, _setup(precision, "fsdp2", "full")),
    ]
    _assert_equal_peaks(cells)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp32"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_the_benchmarks_models_have_the_peaks_of_a_t4(precision: str, checkpointing: str) -> None:
    _assert_equal_peaks([Cell(model=SHAPE, setup=_setup(precision, api, checkpointing)) for api in ("fsdp1", "fsdp2")])
