"""Units of a recorded model that is wrapped by size, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.simulate.models.build import build, few_blocks
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU
from fsdp_bench.simulate.recorded.model import RecordedModule
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.simulate.wrappers.units import choose_units
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from tests.shapes import recorded


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
