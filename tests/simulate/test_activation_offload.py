"""Activation offload: copies, memory on the GPU and in the host, by hand from shapes; and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.replay.host_memory import host_memory
from fsdp_bench.simulate.events import Event, Kind
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.spec.setup import TrainSetup, impossible
from tests.simulate.test_step import shape

MODEL = shape(num_hidden_layers=12, hidden_size=64)
TOKENS = 2 * 256


def _setup(**fields: Any) -> TrainSetup:
    given = {"world_size": 4, "precision": "bf16-mixed", "micro_batch_size": 2, "sequence_length": 256}
    return TrainSetup(**(given | {"activation_offload": True} | fields))


def _copies(setup: TrainSetup, direction: str) -> list[Event]:
    events = steady_step(MODEL, setup, CUDA).last_step()
    return [event for event in events if event.kind is Kind.COPY and event.work and event.work.name == direction]


def test_the_inputs_of_a_checkpointed_block_are_copied_to_the_host_and_back() -> None:
    """bf16: the tokens' hidden states, and two rotary tables of 256 x 16."""
    setup = _setup(checkpointing="full")
    for direction in ("to_host", "to_device"):
        sizes = [event.work.num_bytes for event in _copies(setup, direction) if event.work]
        assert sorted(sizes) == sorted([TOKENS * 64 * 2, 256 * 16 * 2, 256 * 16 * 2] * 12)
    # All three are powers of two, which pinned memory is rounded to.
    assert host_memory(MODEL, setup, 4).pinned_activations_bytes == 4 * 12 * 2 * (TOKENS * 64 + 2 * 256 * 16)


def test_without_checkpointing_every_saved_tensor_goes_to_the_host_and_back() -> None:
    there, back = (_copies(_setup(), direction) for direction in ("to_host", "to_device"))
    assert [event.work for event in there if event.work] != []
    assert sum(event.work.num_bytes for event in there if event.work) == sum(
        event.work.num_bytes for event in back if event.work
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_more_blocks_add_no_activations_to_the_peak(checkpointing: str) -> None:
    """Deeper models add parameters and optimizer states, but no saved tensors."""
    fields = {"checkpointing": checkpointing, "sequence_length": 4096, "strategy": "FULL_SHARD", "world_size": 64}
    deep, shallow = (shape(num_hidden_layers=layers, max_position_embeddings=4096) for layers in (40, 20))
    grown = [
        predict_memory(deep, _setup(activation_offload=given, **fields), CUDA).phases["loss"]
        - predict_memory(shallow, _setup(activation_offload=given, **fields), CUDA).phases["loss"]
        for given in (True, False)
    ]
    saved = 20 * 2 * 4096 * 64 * 2  # the inputs alone of twenty blocks
    assert grown[0] < saved / 20
    assert grown[1] >= saved


def test_host_memory_does_not_grow_with_accumulation() -> None:
    once, often = (host_memory(MODEL, _setup(gradient_accumulation_steps=count), 4) for count in (1, 4))
    assert once == often
    assert once.peak_bytes == once.pinned_activations_bytes > 0


@pytest.mark.parametrize(
    ("fields", "device", "says"), [({}, "cpu", "on a CPU"), ({"compile": True}, "cuda", "use one")]
)
def test_an_impossible_setup_is_refused_with_a_reason(fields: dict[str, Any], device: str, says: str) -> None:
    reason = impossible(_setup(**fields), device)
    assert reason is not None
    assert says in reason
