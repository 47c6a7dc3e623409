"""Other code than the benchmark's: what loading allocates, and where its forward reads from the GPU and the host waits.

A model is moved from host memory, or built on the meta device.
"""

from math import prod

import pytest

from fsdp_bench.catalog.architectures import recorded_architecture
from fsdp_bench.catalog.lookup import model as model_named
from fsdp_bench.replay.live_memory import live_memory
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.simulate.recorded.bind import reads
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.recording.steps import Operator
from fsdp_bench.spec.setup import TrainSetup
from tests.shapes import llama_config, memory_of

CONFIG = llama_config(
    **{"intermediate_size": 128, "vocab_size": 1001, "tie_word_embeddings": False, "attention_bias": False},
    **{"mlp_bias": False, "hidden_act": "silu"},
)
ENDS = [(1001, 64), (64,), (1001, 64)]
BLOCK = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128), (64,), (64,)]
MOST_BUFFERS = 4096
"""Bytes of the rotary embedding's buffers."""


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def _whole(shapes: list[tuple[int, ...]]) -> int:
    return sum(_rounded(4 * prod(shape)) for shape in shapes)


def _sharded_by_rows(shapes: list[tuple[int, ...]]) -> int:
    return sum(_rounded(4 * -(-shape[0] // 2) * prod(shape[1:])) for shape in shapes)


def _flat_shard(shapes: list[tuple[int, ...]]) -> int:
    return _rounded(4 * -(-sum(map(prod, shapes)) // 2))


LOADED = {
    # Units before the root are sharded; the root's parameters are whole on the device, and beside them their shards.
    "fsdp2": 4 * _sharded_by_rows(BLOCK) + _whole(ENDS) + _sharded_by_rows(ENDS),
    # The root's parameters, their concatenation, and its shard.
    "fsdp1": 4 * _flat_shard(BLOCK) + _whole(ENDS) + _rounded(4 * sum(map(prod, ENDS))) + _flat_shard(ENDS),
}


def _loaded(api: str, kernels: Kernels) -> Log:
    model = recorded_architecture(CONFIG, 64, "llama")
    setup = TrainSetup(api=api, strategy="FULL_SHARD", world_size=2, precision="fp32", sequence_length=64)  # type: ignore[arg-type]
    return SimulatedSteps(model, setup, kernels).step(every_block=True)


@pytest.mark.parametrize("api", LOADED)
def test_a_model_in_host_memory_is_moved_to_the_gpu_unit_by_unit(api: str) -> None:
    """fully_shard and FullyShardedDataParallel: _move_states_to_device, then sharding; sizes by hand, on two ranks."""
    log = _loaded(api, kernels_on(CUDA, None, moves_model=True))
    assert not any(event.label == "aten::normal_" for event in log.events if event.kind is Kind.ALLOCATE)
    assert 0 <= live_memory(log).phases["load"].num_bytes - LOADED[api] <= MOST_BUFFERS


def test_each_rank_initializes_its_shards_in_place_where_a_model_is_built_on_the_meta_device() -> None:
    """``to_empty`` and ``initialize_weights``, as exported scripts do under fully_shard: nothing is whole; by hand."""
    loaded = live_memory(_loaded("fsdp2", CUDA)).phases["load"].num_bytes
    assert 0 <= loaded - 4 * _sharded_by_rows(BLOCK) - _sharded_by_rows(ENDS) <= MOST_BUFFERS


@pytest.mark.parametrize("world_size", [1, 8])
def test_without_fsdp_a_model_is_moved_to_the_gpu_parameter_by_parameter(world_size: int) -> None:
    """1,235,814,400 parameters of Llama-3.2-1B (its model card) in 2 bytes; DDP adds its bucket and what it sends."""
    setup = TrainSetup(api="fsdp2", strategy="NO_SHARD", world_size=world_size, precision="bf16-true")
    loaded = memory_of(model_named("Llama-3.2-1B", code="huggingface"), setup, CUDA).phases["load"]
    whole = 2 * 1_235_814_400
    expected = whole if world_size == 1 else 2 * whole
    assert expected <= loaded < expected + 2**20


GPT2_PARAMETERS = 124_439_808
"""GPT-2's, which has no buffers; published on Hugging Face."""
GPT2_LARGEST = 50257 * 768
"""The table of tokens, a unit's largest parameter."""


@pytest.mark.parametrize(
    ("code", "copied"),
    [("huggingface", 0), ("benchmark", GPT2_LARGEST)],  # the benchmark copies a matrix from random numbers in fp32
)
def test_loading_takes_the_parameters_and_what_fills_them(code: str, copied: int) -> None:
    setup = TrainSetup(api="fsdp2", strategy="NO_SHARD", world_size=1, sequence_length=256, precision="bf16-mixed")
    load = memory_of(model_named("gpt2", 256, code=code), setup).phases["load"]
    assert load == 4 * (GPT2_PARAMETERS + copied)


MASKS = {"Llama-3.2-1B": 1, "Gemma-2-9B": 2, "bert-base-uncased": 0}
"""transformers makes a mask for each kind of attention; find_packed_sequence_indices reads for each of a decoder's."""


@pytest.mark.parametrize(("name", "num_masks"), MASKS.items())
def test_the_host_waits_in_forward_once_for_each_mask_and_never_between_blocks(name: str, num_masks: int) -> None:
    setup = TrainSetup(api="fsdp2", world_size=8, sequence_length=512)
    forward, before_blocks, phase, block = 0, 0, "", -1
    for event in SimulatedSteps(model_named(name, code="huggingface"), setup, CUDA).step().events:
        if event.kind is Kind.MARK:
            phase, block = event.label, event.number
        elif event.kind is Kind.SYNCHRONIZE and phase == "forward":
            forward += 1
            before_blocks += block == -1
    assert forward == before_blocks == num_masks


@pytest.mark.parametrize(
    ("names", "num_reads"),
    [
        (["aten::sub", "prim::device", "aten::ne", "prim::device", "aten::cumsum"], 1),  # masking_utils.py
        (["aten::ne", "aten::_to_copy", "aten::cumsum", "aten::mul"], 0),  # modeling_roberta.py: .ne(padding).int()
        (["aten::ones", "aten::cumsum", "aten::mul", "aten::sub"], 0),  # modeling_opt.py: of the attention mask
    ],
)
def test_position_ids_that_are_added_up_from_a_mask_are_not_read(names: list[str], num_reads: int) -> None:
    code = [Operator(name=index, num_bytes=0, itemsize=8, dims=(), makes=()) for index in range(len(names))]
    assert len(reads(code, names)) == num_reads
