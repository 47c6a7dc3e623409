"""Loading other code than the benchmark's: it is built in host memory and moved to the GPU."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.lookup import model
from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.spec.setup import TrainSetup


@pytest.mark.parametrize("world_size", [1, 8])
def test_without_fsdp_a_model_is_moved_to_the_gpu_parameter_by_parameter(world_size: int) -> None:
    """1,235,814,400 parameters of Llama-3.2-1B (its model card) in 2 bytes; DDP adds its bucket and what it sends."""
    setup = TrainSetup(api="fsdp2", strategy="NO_SHARD", world_size=world_size, precision="bf16-true")
    loaded = predict_memory(model("Llama-3.2-1B", code="huggingface"), setup, CUDA).phases["load"]
    whole = 2 * 1_235_814_400
    expected = whole if world_size == 1 else 2 * whole
    assert expected <= loaded < expected + 2**20
