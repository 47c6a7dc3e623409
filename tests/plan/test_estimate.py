"""The whole prediction: cards, hosts, the memory that is kept free, and numbers that can be derived by hand."""

import dataclasses
import json
from itertools import product
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog.ladder import nearest_size
from fsdp_bench.catalog.loader import BUILT_IN, gpu, model
from fsdp_bench.catalog.lookup import model as find_model
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.replay.host_memory import host_memory, pinned_bytes
from fsdp_bench.replay.live_memory import live_memory
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.kernel_workspaces import (
    chunk_cat_arguments,
    embedding_backward_workspace,
    flash_backward_workspace,
    flash_forward_workspace,
    split_arguments,
    workspace_of,
)
from fsdp_bench.simulate.operators.kernels import CPU, CUDA, Kernels, cublas_workspace, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import Api, Checkpointing, Offload, Precision, ShardingStrategy, TrainSetup, Wrap
from tests.shapes import estimate_of, memory_of, shape

LLAMA_8B = model("Llama-3.1-8B").shape()
BF16 = Precision.parse("bf16-mixed")
GIB = 2**30


def test_offload_moves_the_state_to_the_host() -> None:
    """Parameters, gradients and two Adam states in fp32, 16 bytes a parameter over the node's ranks, and foreach's 4.

    Pinned tensors take powers of two, so parameters and gradients may take up to twice as much.
    """
    setup = TrainSetup(world_size=8, sequence_length=512, precision=BF16, offload=Offload.PARAMS)
    host = host_memory(SimulatedSteps(LLAMA_8B, setup), 8)
    n = LLAMA_8B.num_parameters
    assert host.optimizer_state_bytes == pytest.approx(8 * n, rel=1e-3)
    assert host.temporary_bytes == pytest.approx(4 * n, rel=1e-3)
    for pinned in (host.pinned_parameters_bytes, host.pinned_gradients_bytes):
        assert 4 * n <= pinned <= 8 * n * 1.001
    on_device = memory_of(LLAMA_8B, setup)
    without = memory_of(LLAMA_8B, replace(setup, offload=Offload.NONE))
    assert on_device.breakdown_bytes["optimizer_state"] == on_device.breakdown_bytes["parameters"] == 0
    assert on_device.peak_allocated_bytes < without.peak_allocated_bytes


def test_the_host_keeps_the_same_state_however_the_model_is_wrapped() -> None:
    """Elements are dealt to the ranks once, whatever the units; units change only what padding adds."""
    shape = model("gpt2").shape()
    setup = TrainSetup(world_size=8, sequence_length=512, precision=BF16, offload=Offload.PARAMS)
    held = [host_memory(SimulatedSteps(shape, replace(setup, wrap=wrap)), 8).optimizer_state_bytes for wrap in Wrap]
    assert held == pytest.approx([8 * shape.num_parameters] * len(held), rel=1e-3)


@pytest.mark.parametrize("api", list(Api))
def test_a_root_whose_parameters_are_all_in_units_below_is_predicted(api: Api) -> None:
    shape = replace(model("gpt2").shape(), tie_word_embeddings=False)
    setup = TrainSetup(world_size=8, sequence_length=512, api=api, wrap=Wrap.SIZE, min_num_params=1)
    found = memory_of(shape, setup)
    assert found.peak_allocated_bytes == sum(found.breakdown_bytes.values())
    assert found.breakdown_bytes["parameters"] == pytest.approx(4 * shape.num_parameters / 8, rel=0.01)


def test_the_block_of_the_peak_is_that_of_a_simulation_of_every_block() -> None:
    """In backward the blocks come from the last to the first.

    Without large logits FULL_SHARD's peak is there, in the block that stands for several.
    """
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    small = replace(LLAMA_8B, num_hidden_layers=9, vocab_size=128)
    cases = [(replace(LLAMA_8B, num_hidden_layers=9), *which) for which in product(strategies, Checkpointing)]
    for nine, strategy, checkpointing in (*cases, (small, ShardingStrategy.FULL_SHARD, Checkpointing.FULL)):
        setup = TrainSetup(world_size=8, sequence_length=256, strategy=strategy, checkpointing=checkpointing)
        log = SimulatedSteps(nine, setup, CUDA).step(every_block=True)
        whole = log.events
        replayed = live_memory(log)
        peak = replayed.phases[replayed.peak_phase]
        marks = [event.number for event in whole[: peak.event + 1] if event.kind == Kind.MARK]
        block = marks[-1] if marks and marks[-1] >= 0 else None
        assert memory_of(nine, setup).peak_block == block, (strategy, checkpointing)


def test_a_depth_that_would_take_minutes_is_refused() -> None:
    with pytest.raises(SpecError, match="num_hidden_layers: 100000 is not allowed here"):
        estimate_of(replace(LLAMA_8B, num_hidden_layers=100_000), TrainSetup())


def test_a_card_without_flash_attention_has_a_verdict_where_its_kernels_are_predicted() -> None:
    """Recorded code fits only in fp32: it was recorded with FlashAttention."""
    setup = TrainSetup(world_size=8, sequence_length=512, precision=Precision.parse("fp16-mixed"))
    shape, recorded = model("gpt2").shape(), find_model("gpt2", code="huggingface")
    volta = Hardware.of_gpu(gpu("V100-SXM2-32GB"))
    assert estimate_of(shape, setup, volta).fits is True
    assert estimate_of(recorded, setup, volta).fits is None
    assert estimate_of(recorded, replace(setup, precision=Precision.parse("fp32")), volta).fits is True


def test_single_operators_keep_the_weights_of_all_heads_where_no_kernel_takes_bf16() -> None:
    """Each of gpt2's 12 layers saves weights of 12 heads of 4 sequences of 1024 x 1024 tokens in fp32: 192 MiB."""
    setup = TrainSetup(world_size=8, sequence_length=1024, micro_batch_size=4, precision=BF16)
    shape = model("gpt2").shape()
    fp16 = estimate_of(shape, replace(setup, precision=Precision.parse("fp16-mixed")), Hardware.of_gpu(gpu("T4")))
    bf16 = estimate_of(shape, setup, Hardware.of_gpu(gpu("T4")))
    saved = 12 * 12 * 4 * 1024 * 1024 * 4
    assert bf16.memory.peak_allocated_bytes - fp16.memory.peak_allocated_bytes > saved


@pytest.mark.parametrize("card", ["V100-SXM2-16GB", "T4"])
def test_recorded_code_does_not_fit_what_exceeds_a_card_with_any_attention(card: str) -> None:
    """Parameters, gradients and two states of 8.03e9 in fp32 over 8 ranks are 14.96 GiB; and the logits of gpt2."""
    fp16 = TrainSetup(world_size=8, sequence_length=512, precision=Precision.parse("fp16-mixed"))
    where = Hardware.of_gpu(gpu(card))
    found = estimate_of(find_model("Llama-3.1-8B", code="huggingface"), fp16, where)
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert found.least_bytes >= 4 * 4 * 8_030_261_248 // 8
    many = replace(fp16, micro_batch_size=96, sequence_length=1024)
    assert estimate_of(find_model("gpt2", code="huggingface"), many, where).verdict is Verdict.DOES_NOT_FIT


def test_what_only_flash_attentions_own_kernel_allocates_is_no_part_of_the_least() -> None:
    """Selective checkpointing saves outputs by the operator's name, so another kernel's may not be saved."""
    setup = TrainSetup(world_size=8, sequence_length=512, precision=Precision.parse("fp16-mixed"))
    gpt2, many = find_model("gpt2", code="huggingface"), replace(setup, micro_batch_size=96)
    found = estimate_of(gpt2, many, Hardware.of_gpu(gpu("T4")))
    assert found.least_bytes == found.memory.peak_allocated_bytes
    selective = dataclasses.replace(found.question, setup=replace(setup, checkpointing=Checkpointing.SELECTIVE))
    named = dataclasses.replace(found, question=selective)
    inside = dataclasses.replace(
        found, memory=dataclasses.replace(found.memory, peak_operator="aten::scaled_dot_product_attention")
    )
    for one in (named, inside):
        assert one.least_bytes == max(found.memory.phases["load"], found.memory.phases["optimizer"])


@given(st.integers(min_value=1, max_value=2**50))
def test_a_pinned_tensor_takes_a_power_of_two(num_bytes: int) -> None:
    taken = pinned_bytes(num_bytes)
    assert num_bytes <= taken < 2 * num_bytes
    assert taken & (taken - 1) == 0


def test_heads_that_no_fused_kernel_takes_are_refused_not_guessed() -> None:
    odd, setup = shape(family=Family.GPT2, hidden_size=60), TrainSetup(world_size=8, sequence_length=64)
    with pytest.raises(SpecError, match="head size 15"):
        memory_of(odd, setup)
    assert memory_of(odd, replace(setup, precision=BF16)).peak_allocated_bytes > 0
    assert memory_of(odd, setup, CPU).peak_allocated_bytes > 0


@pytest.mark.parametrize(("size", "splits"), [
    ((1, 4, 512, 64), 2), ((1, 7, 512, 8), 2), ((1, 16, 512, 64), 2), ((1, 24, 512, 64), 1), ((1, 1, 8192, 64), 2),
    ((1, 2, 4096, 128), 2), ((1, 8, 2048, 256), 1), ((1, 5, 8192, 96), 1), ((3, 5, 512, 24), 2), ((4, 7, 200, 64), 1),
    ((1, 1, 2048, 192), 7),
])  # fmt: skip
def test_attentions_forward_splits_keys_where_multiprocessors_have_no_work(
    size: tuple[int, int, int, int], splits: int
) -> None:
    """As torch 2.13's CUDA build splits them for the 132 multiprocessors of an H200, read from its memory history."""
    batch, heads, length, head_dim = size
    sums = splits * batch * heads * length * 4
    rounded = -(-head_dim // 32) * 32
    assert flash_forward_workspace(*size, 132) == ([sums, sums * rounded] if splits > 1 else [])


def test_fsdp2s_copies_pack_their_arguments() -> None:
    """As torch 2.13 allocates them on an H200, read from its memory history: gpt2, 128 wide, 4096 ranks."""
    h200 = kernels_on(CUDA, gpu("H200-SXM"))
    assert split_arguments([64], 4096, h200) == 48  # one bias, a row a rank
    assert split_arguments([512, 4], 4096, h200) == 88  # a weight of 128 columns and its bias
    assert chunk_cat_arguments([512, 4]) == 8 * (6 * 2 + 2 + 2)
    # 64 MiB are 32,768 tiles for twice 132 multiprocessors of 16 blocks each: every block takes 8.
    assert split_arguments([2**26], 1, h200) == 8 * (3 + 4096 + 2)


KERNEL_TIMES = Path(__file__).parents[2] / "results/nvidia-h100/kernel_times.json"
ATTENTION = next(rows for name, rows in json.loads(KERNEL_TIMES.read_text()).items() if name.startswith("attention"))


@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
def test_attention_takes_what_was_measured_on_an_h100(backend: str) -> None:
    kernels = kernels_on(CUDA, gpu("H100-SXM"), flash_alone=backend == "FLASH_ATTENTION")
    shapes = [row[1:] for row in ATTENTION if row[0] == backend]
    assert len(shapes) == 16
    for batch, heads, groups, length, head, causal, _, _, *measured in shapes:
        dims = batch, heads, groups, length, length, head, int(causal)
        rows, state = batch * heads * length, [16, 8]
        forward, backward = (
            workspace_of(f"aten::_scaled_dot_product_flash_attention{which}", dims, 2, kernels)
            for which in ("", "_backward")
        )
        results = [rows * head * 2, *[batch * groups * length * head * 2] * 2]
        sizes = [results[0], rows * 4, *state, *forward.after_second], [*results, *backward.after]
        assert [sum(-(-size // 512) * 512 for size in one) for one in sizes] == measured


def test_blackwell_and_older_cuda_and_odd_heads_take_other_attention() -> None:
    """B200: the answers of cuDNN 9.20, of which 128 bytes are its own; else FlashAttention's, by hand as below."""
    shape = (2, 4, 2, 333, 333, 128, 1)
    rows = 2 * 4 * 333

    def backward(kernels: Kernels, *dims: int) -> int:
        return sum(workspace_of("aten::_scaled_dot_product_flash_attention_backward", dims, 2, kernels).after)

    flash = 2 * 4 * 384 * 4 * (1 + 128) + 2 * rows * 128 * 2
    b200, h100 = (kernels_on(CUDA, gpu(name)) for name in ("B200", "H100-SXM"))
    assert backward(b200, *shape) == 2_738_720
    assert backward(kernels_on(CUDA, gpu("B300")), *shape) == 2_738_720
    assert backward(h100, *shape) == 2_738_720 + 128
    assert backward(kernels_on(CUDA, gpu("H100-SXM").with_cuda("12.8")), *shape) == flash
    assert backward(kernels_on(CUDA, gpu("A100-SXM-80GB")), *shape) == flash
    assert backward(b200, 1, 4, 4, 512, 512, 192, 1) == 4 * 512 * 4 * (1 + 192)  # cuDNN's heads there are 128 at most


def test_workspaces_of_kernels_have_their_documented_sizes() -> None:
    """By hand from the sources that kernel_workspaces.py names."""
    # Two sequences, 4 heads of 64, 200 tokens, rounded to 256: softmax_d, and dq_accum with 64 columns, in fp32.
    assert flash_backward_workspace(2, 4, 200, 64, 1) == [2 * 4 * 256 * 4, 2 * 4 * 256 * 64 * 4]
    # Grouped keys: dk and dv expanded to 4 heads in 16 bits.
    assert flash_backward_workspace(2, 4, 200, 64, 2)[2:] == [2 * 200 * 4 * 64 * 2] * 2
    assert embedding_backward_workspace(3072, 32000, 4096) == ((), ())
    assert cublas_workspace("H100-SXM") == cublas_workspace("H800-SXM") == cublas_workspace("H20") == 32 * 2**20
    assert cublas_workspace("MI355X") == cublas_workspace("MI300X") == 128 * 2**20
    assert cublas_workspace("A100-SXM-80GB") == 8_519_680


GIB, MIB = 2**30, 2**20
MODEL = nearest_size(Family.LLAMA, 100_000_000)
MOST_OF_NCCL_ON_P5 = 614 * MIB  # by hand in tests/rates/test_communicators.py


def cluster(name: str, card_bytes: int | None = None, context_bytes: int | None = None) -> Hardware:
    server = BUILT_IN.server(name)
    gpu = BUILT_IN.gpu(server.gpu)
    gpu = replace(gpu, context_bytes=context_bytes, usable_memory_bytes=card_bytes or gpu.usable_memory_bytes)
    return Hardware(server=server, gpu=gpu, gpus_per_node=8)


def on(where: Hardware, headroom_bytes: int | None = None) -> Prediction:
    setup = TrainSetup(world_size=8, sequence_length=512)
    return estimate_of(MODEL, setup, where, headroom_bytes=headroom_bytes)


@pytest.mark.parametrize(
    ("server", "context", "stated", "kept"),
    [
        ("g6e.48xlarge", None, None, 2 * GIB),  # NCCL over PCIe is not known: the whole assumption
        ("g6e.48xlarge", 600 * MIB, None, 2 * GIB - 600 * MIB),
        ("p5.48xlarge", None, None, 3 * GIB // 2 + MOST_OF_NCCL_ON_P5),  # without the least of a communicator
        ("p5.48xlarge", 600 * MIB, None, MOST_OF_NCCL_ON_P5),  # nothing is assumed
        ("p5.48xlarge", None, GIB, GIB),
        ("p5.48xlarge", 600 * MIB, GIB, GIB - 600 * MIB),  # the card is without the context already
        ("p5.48xlarge", None, 0, 0),
    ],
)
def test_known_context_and_communicators_replace_the_assumption(
    server: str, context: int | None, stated: int | None, kept: int
) -> None:
    found = on(cluster(server, context_bytes=context), stated)
    assert found.required_headroom.num_bytes == kept
    assert found.available_bytes == found.gpu_bytes - kept


@pytest.mark.parametrize("server", ["p5.48xlarge", "g6e.48xlarge"])
def test_a_setup_fits_exactly_when_the_headroom_is_left(server: str) -> None:
    """One byte less than reserved memory and headroom does not fit; without headroom it does."""
    reserved = on(cluster(server)).allocator.peak_reserved_bytes
    kept = on(cluster(server)).required_headroom.num_bytes
    assert on(cluster(server, reserved + kept)).verdict is Verdict.FITS
    assert on(cluster(server, reserved + kept - 1)).fits is False
    assert on(cluster(server, reserved + kept - 1), headroom_bytes=0).fits is True


RATES_OF_AN_H100 = Path(__file__).parents[2] / "results" / "nvidia-h100" / "rates.json"


def test_retries_that_go_on_have_a_time_and_widen_the_range() -> None:
    """Each GiB that a retry frees is reserved again, which together took so long on an H100; published is 1 s each."""
    setup = TrainSetup(world_size=8, precision=BF16, micro_batch_size=3, sequence_length=4096)
    shape_7b, cards = model("Llama-2-7B").shape(), [BUILT_IN.server(name) for name in ("p5en.48xlarge", "p5.48xlarge")]
    nodes = [Hardware(server=one, gpu=gpu(one.gpu), gpus_per_node=8) for one in cards]
    found, full = (estimate_of(shape_7b, setup, one) for one in nodes)
    assert found.speed.retries_seconds is None
    seconds, reading = full.speed.retries_seconds, full.allocator
    assert seconds is not None
    assert reading.num_retries_later
    rows = next(rows for name, rows in json.loads(RATES_OF_AN_H100.read_text()).items() if name.startswith("retries"))
    gibs = [(number * size + asked) / GIB for number, size, asked, *_ in rows]
    measured = median(row[3] / gib for row, gib in zip(rows, gibs, strict=True))
    assert seconds == pytest.approx(2 * measured * reading.retried_bytes_later / GIB, rel=0.15)
    assert full.speed.range is not None
    _, longest = full.speed.range.step_seconds(full.step_seconds or 0.0)
    assert longest >= 1.36 * (full.step_seconds or 0.0) + 1.0 * reading.num_retries_later
