"""Hugging Face's models with a sliding window: predicted peaks against rehearsals, below, at and above the window.

Where attention sees a window, transformers passes a mask of booleans. PyTorch makes one in the dtype of the queries of
it in every layer, which memory-efficient attention saves. Heads that are no multiple of 8 take other kernels.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.loader import models
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.recording.config import HEADS, HIDDEN, WINDOWS
from fsdp_bench.spec.recording.variants import kind_of
from fsdp_bench.spec.setup import Api, Checkpointing, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.train.recording.main import huggingface
from tests.simulate.comparing import against_rehearsals, assert_near
from tests.simulate.recorded.recording import record_here
from tools.validate.random_architectures import _small
from tools.validate.random_setups import Cell

TYPES = ("gemma3_text", "mistral", "phi3", "olmo3", "modernbert")
WINDOW_TOKENS = (512, 1024, 2048, 4096)
TIMES_THE_WINDOW = (0.5, 1, 2, 4, 8)
EVEN, UNEVEN = (64, 80, 128), (12, 20, 100)
"""Widths of heads that are multiples of 8, for which all sizes are recorded, and that are not."""
VARYING = ("gemma3_text", "modernbert", "olmo3")
"""Their rotary tables are computed in the order of a set of strings, which is another in each process
(``for layer_type in set(self.config.layer_types)``), and the allocator then has other blocks free."""


def _window(config: Mapping[str, Any]) -> int | None:
    return next((config[name] for name in WINDOWS if config.get(name) is not None), None)


def _config(source: random.Random, model_type: str, width: int) -> dict[str, Any]:
    """Return a small model of a type, with a window and with heads of a width."""
    entries = [entry for entry in models() if entry.family == model_type]
    config = _small(source, source.choice([entry for entry in entries if _window(entry.hf_config())]))
    if "head_dim" in config:
        config["head_dim"] = width
    else:
        heads = next(config[name] for name in HEADS if name in config)
        config |= {name: heads * width for name in HIDDEN if name in config}
    config |= {name: source.choice(WINDOW_TOKENS) for name in WINDOWS if config.get(name) is not None}
    return {**config, "max_position_embeddings": 8 * max(WINDOW_TOKENS)}


def _setup(source: random.Random, length: int) -> TrainSetup:
    """Return a setup that fits the rehearsed GPU: masks and what is not fused grow with the square of the length."""
    return TrainSetup(
        api=source.choice(list(Api)),
        strategy=source.choice((ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)),
        world_size=source.choice((2, 8, 64)),
        precision=Precision.parse(source.choice(("bf16-mixed", "bf16-true", "fp32"))),
        checkpointing=Checkpointing.FULL if length > 8192 else source.choice(list(Checkpointing)),
        micro_batch_size=1 if length > 4096 else source.randint(1, 3),
        sequence_length=length,
    )


def _cell(source: random.Random, model_type: str, widths: Sequence[int]) -> Cell:
    """Return the next model that can be recorded.

    With some numbers of layers the kinds do not end as recorded. The recorder refuses some sizes in one line, such as a
    Mistral with 6 heads of 12, 3 of them for keys, in bf16-true: a model without a prediction has no peak to compare.
    """
    while True:
        config = _config(source, model_type, source.choice(widths))
        length = int((_window(config) or 0) * source.choice(TIMES_THE_WINDOW))
        setup = _setup(source, length if widths is EVEN else min(length, 4096))
        with suppress(SpecError):
            if widths is UNEVEN:
                model = record_here(huggingface, config, setup.sequence_length, variants=(kind_of(setup).name,))
            else:
                model = recorded_architecture(config, setup.sequence_length, model_type)
            return Cell(config=config, model=model, setup=setup)


def test_masks_of_sliding_windows_count() -> None:
    source = random.Random(14)
    assert_near(against_rehearsals([_cell(source, model_type, EVEN) for model_type in ("mistral", "phi3")]), equal=1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("widths", [EVEN, UNEVEN])
def test_drawn_models_with_a_sliding_window_have_the_predicted_peaks(model_type: str, widths: Sequence[int]) -> None:
    source = random.Random(f"{model_type} {widths}")
    assert_near(
        against_rehearsals([_cell(source, model_type, widths) for _ in range(6)]),
        equal=5 / 6 if model_type in VARYING else 1,
    )
