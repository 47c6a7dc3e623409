"""Setups whose compiled blocks are predicted, the tensors that these save, and the tuning of their kernels.

Inductor tunes each kernel once, in the first step, on a buffer of the size of the L2 cache.
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu, model
from fsdp_bench.simulate.compiled.block import tune
from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU, CUDA, CUDA_OBSERVED, Kernels, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.recording.compiled import huggingface_block, parts_of_both_ways, regime_of, splits_of_sum
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Api, Checkpointing, Float8, Loss, Precision, ShardingStrategy, TrainSetup, Wrap
from fsdp_bench.spec.units import MIB
from tests.shapes import estimate_of, memory_of, recorded

LLAMA = model("Llama-3.1-8B").shape()
SETUP = TrainSetup(
    world_size=8, sequence_length=4096, micro_batch_size=2, compile=True, precision=Precision.parse("bf16-mixed")
)


@pytest.mark.parametrize(
    ("change", "kernels", "part"),
    [
        ({"api": Api.FSDP2, "strategy": ShardingStrategy.NO_SHARD}, CUDA, "DistributedDataParallel"),
        ({"wrap": Wrap.SIZE}, CUDA, "units may be inside"),
        ({"checkpointing": Checkpointing.SELECTIVE, "checkpointing_policy": "aten.silu"}, CUDA, "not recorded"),
        ({"compile": False, "loss": Loss.COMPILED}, CPU, "compiled loss"),
        ({}, CPU, "CUDA alone"),
        ({}, CUDA_OBSERVED, "CUDA alone"),
    ],
)
def test_setups_without_compiled_predictions_have_a_reason(change: dict[str, Any], kernels: Kernels, part: str) -> None:
    assert part in (why_eager(LLAMA, replace(SETUP, **change), kernels) or "")


def test_sizes_that_inductor_pads_are_not_covered() -> None:
    assert "multiples of 64" in (why_eager(replace(LLAMA, intermediate_size=14335), SETUP, CUDA) or "")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compile": False},
        {"loss": Loss.COMPILED},
        {"api": Api.FSDP2, "strategy": ShardingStrategy.NO_SHARD, "world_size": 1},  # without FSDP
    ],
)
def test_covered_setups_are_predicted_as_compiled(change: dict[str, Any]) -> None:
    assert why_eager(LLAMA, replace(SETUP, **change), CUDA) is None
    assert not estimate_of(LLAMA, replace(SETUP, **change)).for_eager


QWEN = recorded("Qwen2.5-7B", 4096)


@pytest.mark.parametrize(
    ("named", "change", "part"),
    [
        ("SmolLM3-3B", {}, "models whose blocks are all alike, which SmolLM3-3B's are not"),
        ("Mixtral-8x7B", {}, "compiled blocks of MixtralForCausalLM are not recorded"),
        ("Mistral-7B-v0.1", {}, "blocks with a mask, beyond a sliding window"),
        ("Qwen2.5-7B", {"precision": Precision.parse("fp32")}, "in 32 bits with checkpointing none, for 8192 tokens"),
        ("Qwen2.5-7B", {"wrap": Wrap.SIZE}, "units may be inside"),
    ],
)
def test_some_blocks_of_hugging_face_are_predicted_in_eager(named: str, change: dict[str, object], part: str) -> None:
    assert part in (why_eager(recorded(named, 4096), replace(SETUP, **change), CUDA) or "")


@pytest.mark.parametrize("named", ["Qwen2.5-7B", "Qwen3-8B", "Llama-3.1-8B", "Mistral-7B-v0.3", "Phi-4", "OLMo-2-7B"])
@pytest.mark.parametrize("batch", [1, 2])
def test_dense_decoders_of_hugging_face_are_compiled(named: str, batch: int) -> None:
    assert why_eager(recorded(named, 4096), replace(SETUP, micro_batch_size=batch), CUDA) is None


def test_a_tied_head_is_no_other_block() -> None:
    tied = recorded("Qwen2.5-0.5B", 4096)
    assert QWEN.code.architecture.settings != tied.code.architecture.settings
    assert huggingface_block(QWEN.code.architecture) == huggingface_block(tied.code.architecture)


@pytest.mark.parametrize("deep", [lambda n: replace(LLAMA, num_hidden_layers=n), QWEN.with_layers], ids=["own", "hf"])
@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_compiled_blocks_save_less(deep: Callable[[int], Model], api: Api, checkpointing: Checkpointing) -> None:
    """Without checkpointing the partitioner saves less than eager; with it the inputs of a block, as eager does."""
    setup = replace(SETUP, api=api, checkpointing=checkpointing)
    eager, compiled = (
        memory_of(deep(17), one, CUDA).phases["forward"] - memory_of(deep(16), one, CUDA).phases["forward"]
        for one in (replace(setup, compile=False), setup)
    )
    assert compiled < eager if checkpointing is Checkpointing.NONE else compiled == eager


FLOAT8 = [{"float8": Float8.ROWWISE, "checkpointing": each} for each in Checkpointing]


@pytest.mark.parametrize("change", [{}, *FLOAT8], ids=str)
def test_one_block_stands_for_others_as_every_block_does(change: dict[str, Any]) -> None:
    setup = replace(SETUP, api=Api.FSDP2, **change)
    peaks = [memory_of(replace(LLAMA, num_hidden_layers=n), setup).peak_allocated_bytes for n in (4, 12, 20)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1]


def test_sums_are_split_as_inductor_splits_them() -> None:
    """On 132 multiprocessors of 2048 threads; read from code that torch 2.13 wrote for an H200."""
    assert splits_of_sum(4096, 512, 132, 2048) == 32
    assert parts_of_both_ways(4096, 132) == 256
    assert parts_of_both_ways(16384, 132) == 1024
    assert (regime_of(16384, 512), regime_of(4096, 512), regime_of(4096, 4096)) == (
        "both ways",
        "more tokens",
        "few tokens",
    )


def peak_of_tuning(alive: int, peak_before: int, copies: list[int], is_backward: bool) -> int:
    """Return the bytes above what is alive, at the highest."""
    tape = Tape(rounding=512)
    tape.mark("backward")
    _held = tape.storage(alive, "held")
    tape.storage(peak_before - alive, "gone")  # nobody holds it: it is freed at once
    begin = len(tape.events)
    tune(Operators(tape, kernels_on(CUDA, gpu("H100-SXM"))), copies, is_backward)
    level = highest = 0
    for event in tape.events[begin:]:
        level += {Kind.ALLOCATE: event.num_bytes, Kind.FREE: -event.num_bytes}.get(event.kind, 0)
        highest = max(highest, level)
    assert level == 0
    return highest


def test_forward_copies_what_a_kernel_changes() -> None:
    assert peak_of_tuning(100 * MIB, 100 * MIB, [70 * MIB], is_backward=False) == 120 * MIB


@pytest.mark.parametrize(
    ("peak_before", "copy", "expected"),
    [
        (180 * MIB, 70 * MIB, 120 * MIB),  # fits below the peak
        (100 * MIB, 70 * MIB, 50 * MIB),  # does not, not even below what the buffer made of it
        (100 * MIB, 30 * MIB, 80 * MIB),  # does when the second configuration is tried
    ],
)
def test_backward_copies_what_does_not_raise_the_peak(peak_before: int, copy: int, expected: int) -> None:
    assert peak_of_tuning(100 * MIB, peak_before, [copy], is_backward=True) == expected


def test_kernels_are_tuned_in_the_first_step_alone() -> None:
    log = SimulatedSteps(
        replace(LLAMA, num_hidden_layers=2), replace(SETUP, api="fsdp2"), kernels_on(CUDA, gpu("H100-SXM"))
    ).step()
    buffers = [index for index, event in enumerate(log.events) if event.num_bytes == 50 * MIB]
    assert buffers
    assert max(buffers) < log.steps[-1].start
    assert not [event for event in log.last_step() if event.label == "Inductor's tuning"]
