"""Loading a model of other code: its parameters are filled in place, or moved from host memory."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.lookup import model
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.spec.setup import TrainSetup
from tests.predicted import memory_of

PARAMETERS = 124_439_808
"""GPT-2's, which has no buffers; published on Hugging Face."""
LARGEST = 50257 * 768
"""The table of tokens, a unit's largest parameter."""


@pytest.mark.parametrize(
    ("code", "copied"),
    [("huggingface", 0), ("benchmark", LARGEST)],  # the benchmark copies a matrix from random numbers in fp32
)
def test_loading_takes_the_parameters_and_what_fills_them(code: str, copied: int) -> None:
    setup = TrainSetup(api="fsdp2", strategy="NO_SHARD", world_size=1, sequence_length=256, precision="bf16-mixed")
    load = memory_of(model("gpt2", 256, code=code), setup, CUDA).phases["load"]
    assert load == 4 * (PARAMETERS + copied)
