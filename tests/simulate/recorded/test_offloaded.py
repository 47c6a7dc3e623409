"""Activation offload of recorded models: from the catalogue's recordings, without torch. Sizes are from shapes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import steady_step
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from tests.simulate.recorded.test_replaced_loss import BATCH, LENGTH, NARROW, recorded

HIDDEN, LAYERS = NARROW["hidden_size"], NARROW["num_hidden_layers"]


@pytest.fixture(scope="module")
def llama() -> RecordedModel:
    return recorded("Llama-3.2-1B", **NARROW)


def _setup(**fields: Any) -> TrainSetup:
    given = {"precision": "bf16-mixed", "micro_batch_size": BATCH, "sequence_length": LENGTH}
    return TrainSetup(**(given | {"world_size": 8, "activation_offload": True} | fields))


def _copied(model: RecordedModel, setup: TrainSetup, direction: str) -> list[int]:
    events = steady_step(model, setup, CUDA).last_step()
    return [e.work.num_bytes for e in events if e.kind is Kind.COPY and e.work and e.work.name == direction]


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_a_checkpointed_block_copies_its_positional_inputs(llama: RecordedModel, api: str) -> None:
    """transformers calls a block with its hidden states; rotary tables and masks are keyword arguments, and stay."""
    setup = _setup(api=api, checkpointing="full")
    for direction in ("to_host", "to_device"):
        assert _copied(llama, setup, direction) == [BATCH * LENGTH * HIDDEN * 2] * LAYERS


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_without_checkpointing_every_saved_tensor_goes_to_the_host_and_back(llama: RecordedModel, api: str) -> None:
    there, back = (_copied(llama, _setup(api=api), direction) for direction in ("to_host", "to_device"))
    assert sorted(there) == sorted(back)
    attention = BATCH * LENGTH * HIDDEN * 2
    assert there.count(attention) >= 2 * LAYERS  # queries, and what attention returns


def test_attention_copies_its_output_when_it_comes_back_head_by_head(llama: RecordedModel) -> None:
    """_flash_attention_backward makes it contiguous token by token, as it was before it went to the host."""
    made = []
    for is_offloaded in (True, False):
        events = steady_step(llama, _setup(activation_offload=is_offloaded), CUDA).last_step()
        sizes = [event.num_bytes for event in events if event.label.endswith("flash_attention_backward")]
        made.append(sizes.count(BATCH * LENGTH * HIDDEN * 2))
    assert made[0] == made[1] + LAYERS


def test_variants_that_were_not_recorded_are_refused(llama: RecordedModel) -> None:
    some = _setup(checkpointing="full", checkpointing_policy="every-2-blocks")
    assert "some blocks checkpointed" in str(why_impossible(llama, some, "cuda"))
    known = {name: raw for name, raw in llama.code.variants.items() if "offloaded" not in name}
    same = {name: like for name, like in llama.code.same.items() if "offloaded" not in name}
    older = replace(llama, code=replace(llama.code, variants=known, same=same))
    assert "fsdp-bench record --activation-offload" in str(why_impossible(older, _setup(), "cuda"))
