"""AdamW8bit: sizes of its states, and refusals. tests/on_stand_in compares its memory with torchao's own code."""

from __future__ import annotations

import pytest

from fsdp_bench.simulate.optimizers.adamw_8bit import bytes_of_moment
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import TrainSetup


def test_a_moment_takes_a_byte_a_value_where_blocks_are_whole() -> None:
    """torchao/optim/adam.py, _new_buffer: 4096 values or more, a multiple of 256; subclass_8bit.py, zeros."""
    assert bytes_of_moment(65536, 4) == [65536, 256 * 4, 256 * 4]
    assert bytes_of_moment(4095, 2) == [4095 * 2]
    assert bytes_of_moment(4096 + 128, 4) == [(4096 + 128) * 4]


@pytest.mark.parametrize("offload", ["params"])
def test_offloaded_parameters_are_refused_with_an_alternative(offload: str) -> None:
    reason = impossible(TrainSetup(world_size=2, optimizer="adamw-8bit", offload=offload), "cuda")
    assert reason is not None
    assert "use adamw-fused" in reason
