"""Activation offload: copies, memory on the GPU and in the host, by hand from shapes."""

from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.replay.host_memory import host_memory
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from tests.shapes import recorded, shape
from tests.simulate.test_losses import NARROW

MODEL = shape(num_hidden_layers=12, hidden_size=64)
TOKENS = 2 * 256
HIDDEN, LAYERS = NARROW["hidden_size"], NARROW["num_hidden_layers"]


def _setup(**fields: Any) -> TrainSetup:
    given = {"world_size": 4, "precision": "bf16-mixed", "micro_batch_size": 2, "sequence_length": 256}
    return TrainSetup(**(given | {"activation_offload": True} | fields))


@pytest.fixture(scope="module")
def llama() -> RecordedModel:
    return recorded("Llama-3.2-1B", 1024, **NARROW)


def _copied(model: ModelShape | RecordedModel, setup: TrainSetup, direction: str) -> list[int]:
    """Return the bytes of each copy in a direction."""
    events = SimulatedSteps(model, setup, CUDA).step().last_step()
    return [e.work.num_bytes for e in events if e.kind is Kind.COPY and e.work and e.work.name == direction]


def test_the_inputs_of_a_checkpointed_block_are_copied_to_the_host_and_back() -> None:
    """bf16: the tokens' hidden states, and two rotary tables of 256 x 16."""
    setup = _setup(checkpointing="full")
    for direction in ("to_host", "to_device"):
        assert sorted(_copied(MODEL, setup, direction)) == sorted([TOKENS * 64 * 2, 256 * 16 * 2, 256 * 16 * 2] * 12)
    # All three are powers of two, which pinned memory is rounded to.
    assert host_memory(SimulatedSteps(MODEL, setup), 4).pinned_activations_bytes == 4 * 12 * 2 * (
        TOKENS * 64 + 2 * 256 * 16
    )


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_a_checkpointed_block_of_hugging_face_copies_its_positional_inputs(llama: RecordedModel, api: str) -> None:
    """transformers calls a block with its hidden states; rotary tables and masks are keyword arguments, and stay."""
    setup = _setup(api=api, checkpointing="full")
    for direction in ("to_host", "to_device"):
        assert _copied(llama, setup, direction) == [TOKENS * HIDDEN * 2] * LAYERS


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_without_checkpointing_every_saved_tensor_goes_to_the_host_and_back(
    llama: RecordedModel, is_recorded: bool, api: str
) -> None:
    model, width, layers = (llama, HIDDEN, LAYERS) if is_recorded else (MODEL, 64, 12)
    there, back = (_copied(model, _setup(api=api), direction) for direction in ("to_host", "to_device"))
    assert sorted(there) == sorted(back)
    assert there.count(TOKENS * width * 2) >= 2 * layers  # queries, and what attention returns


def test_attention_copies_its_output_when_it_comes_back_head_by_head(llama: RecordedModel) -> None:
    """_flash_attention_backward makes it contiguous token by token, as it was before it went to the host."""
    made = []
    for is_offloaded in (True, False):
        events = SimulatedSteps(llama, _setup(activation_offload=is_offloaded), CUDA).step().last_step()
        sizes = [event.num_bytes for event in events if event.label.endswith("flash_attention_backward")]
        made.append(sizes.count(TOKENS * HIDDEN * 2))
    assert made[0] == made[1] + LAYERS


def test_variants_that_were_not_recorded_are_refused(llama: RecordedModel) -> None:
    some = _setup(checkpointing="full", checkpointing_policy="every-2-blocks")
    assert "some blocks checkpointed" in str(why_impossible(llama, some, "cuda"))
    known = {name: raw for name, raw in llama.code.variants.items() if "offloaded" not in name}
    same = {name: like for name, like in llama.code.same.items() if "offloaded" not in name}
    older = replace(llama, code=replace(llama.code, variants=known, same=same))
    assert "fsdp-bench record --activation-offload" in str(why_impossible(older, _setup(), "cuda"))


def test_host_memory_does_not_grow_with_accumulation() -> None:
    once, often = (host_memory(SimulatedSteps(MODEL, _setup(gradient_accumulation_steps=count)), 4) for count in (1, 4))
    assert once == often
    assert once.peak_bytes == once.pinned_activations_bytes > 0
