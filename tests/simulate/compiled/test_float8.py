"""Blocks whose linear layers compute in float8: what is refused, in which order backward runs, how long it takes."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu, gpus
from fsdp_bench.catalog.lookup import cluster_of
from fsdp_bench.catalog.recorded import FLOAT8, compiled_catalog
from fsdp_bench.plan.ask import estimate
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.rates.datasheet import datasheet
from fsdp_bench.simulate.compiled.block import bind_code
from fsdp_bench.simulate.compiled.choose import _bound, _kinds, why_eager
from fsdp_bench.simulate.events import FAST_ACCUMULATION, SCALES_OF_ROWS, Kind, Work
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.checkpointing_policy import EVERY_SECOND_PRODUCT
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.compiled import Order, float8_regime_of, splits_of_maximum, symbols_of_float8
from fsdp_bench.spec.setup import Api, Checkpointing, Float8, Precision, ShardingStrategy, TrainSetup, Wrap
from tests.shapes import memory_of
from tests.simulate.compiled.test_choose import LLAMA
from tests.simulate.compiled.test_choose import SETUP as COMPILED

SETUP = replace(COMPILED, api=Api.FSDP2, float8=Float8.ROWWISE)
RECIPES = (Float8.TENSORWISE, Float8.ROWWISE)
OF_TORCHTITAN = (Checkpointing.SELECTIVE, EVERY_SECOND_PRODUCT)
H100 = kernels_on(CUDA, gpu("H100-SXM"))


NARROW = replace(LLAMA, intermediate_size=14336 - 8)


@pytest.mark.parametrize(
    ("shape", "change", "device", "part"),
    [
        (LLAMA, {"compile": False}, "cuda", "use compile"),
        (LLAMA, {"precision": Precision.parse("fp32")}, "cuda", "fp32 computes in fp32"),
        (LLAMA, {"precision": Precision.parse("fp16")}, "cuda", "computes in fp16"),
        (LLAMA, {"sequence_length": 4097, "micro_batch_size": 1}, "cuda", "multiple of 16 tokens"),
        (LLAMA, {}, "cpu", "compute capability 8.9"),
        (NARROW, {}, "cuda", "multiples of 16"),
        (LLAMA, {"strategy": ShardingStrategy.NO_SHARD}, "cuda", "DistributedDataParallel"),
        (LLAMA, {"wrap": Wrap.SIZE}, "cuda", "units may be inside"),
        (LLAMA, {"float8": Float8.ROWWISE_WITH_GW_HP}, "cuda", "not recorded in float8 rowwise_with_gw_hp"),
        (LLAMA, {"checkpointing": "selective", "checkpointing_policy": "aten.silu"}, "cuda", "not recorded in float8"),
    ],
)
def test_what_cannot_run_or_was_not_recorded_in_float8_is_refused_in_one_line_and_not_predicted_in_eager(
    shape: ModelShape, change: dict[str, Any], device: str, part: str
) -> None:
    reason = str(why_impossible(shape, replace(SETUP, **change), device))
    assert part in reason
    assert "\n" not in reason


@pytest.mark.parametrize("name", ["A100-SXM-80GB", "MI300X"])
def test_gpus_without_products_in_float8_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"float8: {name} .* compute capability 8.9"):
        estimate(LLAMA, SETUP, Hardware.of_gpu(gpu(name)))


def test_maxima_are_split_as_inductor_splits_them() -> None:
    """On 132 multiprocessors of 2048 threads; read from code that torch 2.13 wrote for an H200."""
    numels = (3072 * 2048, 2048 * 2048, 5632 * 2048, 3072 * 5632, 512 * 2048, 3072 * 512)
    assert [splits_of_maximum(numel, 132, 2048) for numel in numels] == [768, 512, 512, 528, 128, 192]


@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [*product(RECIPES, (*[(kind, None) for kind in Checkpointing], OF_TORCHTITAN))]
)
@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 8),
    length=st.sampled_from([512, 1024, 4096, 8192]),
    groups=st.sampled_from([2, 4, 8]),
    heads=st.sampled_from([8, 16, 32, 64]),
    ratio=st.sampled_from([2.5, 3.5, 4.0]),
)
def test_every_size_is_recorded_and_runs_in_the_order_with_the_lowest_peak(
    recipe: Float8,
    checkpointing: tuple[Checkpointing, str | None],
    batch: int,
    length: int,
    groups: int,
    heads: int,
    ratio: float,
) -> None:
    shape = replace(
        LLAMA,
        hidden_size=128 * heads,
        num_attention_heads=heads,
        num_key_value_heads=heads // groups,
        intermediate_size=64 * round(ratio * 2 * heads),
    )
    kind, policy = checkpointing
    setup = replace(SETUP, float8=recipe, checkpointing=kind, checkpointing_policy=policy)
    setup = replace(setup, micro_batch_size=batch, sequence_length=length)
    assert why_eager(shape, setup, H100) is None
    (compiled,) = _kinds(shape, setup, H100)
    sizes = {"B": batch, "S": length, "hidden_size": 128 * heads, "num_attention_heads": heads, "head_dim": 128}
    sizes |= {"num_key_value_heads": heads // groups, "intermediate_size": shape.intermediate_size}
    # An H100 has 132 multiprocessors of 2048 threads.
    assert compiled.regime == float8_regime_of(sizes, recipe, 132)
    symbols, codes = symbols_of_float8(sizes, 132, 2048), compiled_catalog(FLOAT8).codes
    names = [name for order in Order if (name := compiled._replace(order=order).name) in codes]
    peaks = [bind_code(codes[name], symbols, H100).backward_peak for name in names]
    assert _bound(compiled, shape, setup, H100).backward_peak == min(peaks)


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 2000), n=st.integers(1, 2000), k=st.integers(1, 2000))
def test_a_product_in_float8_takes_no_longer_than_the_same_in_bf16(m: int, n: int, k: int) -> None:
    """On every GPU whose peak is twice as high."""
    dims = 16 * m, 16 * n, 16 * k
    elements = dims[0] * dims[2] + dims[2] * dims[1]
    for entry in gpus():
        if "fp8" not in entry.dense_flops_per_second:
            continue
        assert entry.dense_flops_per_second["fp8"] >= 1.99 * entry.dense_flops_per_second["bf16"]
        rates = datasheet(Hardware.of_gpu(entry), SETUP)
        out = 2 * dims[0] * dims[1]
        float8 = rates.run(Work("aten::mm nt", elements + out, dims, 1))
        bf16 = rates.run(Work("aten::mm nt", 2 * elements + out, dims, 2))
        assert float8 <= bf16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_has_as_many_flops_in_float8_as_in_bf16_and_the_head_stays_in_bf16(recipe: Float8) -> None:
    def flops(setup: TrainSetup) -> dict[int, int]:
        found: dict[int, int] = {}
        for event in SimulatedSteps(replace(LLAMA, num_hidden_layers=2), setup, H100).step().last_step():
            if event.kind is Kind.KERNEL and event.work is not None and event.work.is_product:
                m, n, k = event.work.dims
                found[event.work.itemsize] = found.get(event.work.itemsize, 0) + m * n * k
        return found

    in_float8, in_bf16 = flops(replace(SETUP, float8=recipe)), flops(replace(SETUP, float8=Float8.NONE))
    tokens = SETUP.micro_batch_size * SETUP.sequence_length
    assert in_float8[2] == 3 * tokens * LLAMA.hidden_size * LLAMA.vocab_size
    assert in_float8[1] + in_float8[2] == in_bf16[2]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_in_float8_is_timed_and_adds_up(recipe: Float8) -> None:
    def step(float8: Float8) -> Any:
        setup = replace(SETUP, float8=float8)
        return speed_of(Question(LLAMA, setup, cluster_of("8 x H100-SXM"))).time

    own, bf16 = step(recipe), step(Float8.NONE)
    assert not own.unknown
    assert own.step_seconds < bf16.step_seconds
    assert own.compute_seconds + own.exposed_communication_seconds <= own.step_seconds * 1.001


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchtitans_checkpointing_keeps_every_second_product_in_16_bits_and_recomputes_the_others(
    recipe: Float8,
) -> None:
    """A block's input, queries, values, attention's output with fp32 numbers of its rows, and the gate's product.

    Keys, attention's projection and the second product of the MLP are computed again.
    """
    setup = replace(SETUP, float8=recipe, checkpointing="selective", checkpointing_policy=EVERY_SECOND_PRODUCT)
    found = [memory_of(replace(LLAMA, num_hidden_layers=layers), setup).phases["forward"] for layers in (12, 13)]
    kept = 2 * (3 * LLAMA.hidden_size + LLAMA.kv_size + LLAMA.intermediate_size) + 4 * LLAMA.num_attention_heads
    states = 3 * 4 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) // setup.world_size
    tokens = setup.micro_batch_size * setup.sequence_length
    assert found[1] - found[0] == pytest.approx(states + tokens * kept, rel=0.001)
    products = [
        event.work
        for event in SimulatedSteps(replace(LLAMA, num_hidden_layers=1), setup, H100).step().last_step()
        if event.kind is Kind.KERNEL and event.work is not None and event.work.is_product and event.work.itemsize == 1
    ]
    assert sum(FAST_ACCUMULATION in one.name for one in products) == 7 + 3
    assert sum(FAST_ACCUMULATION not in one.name for one in products) == 14
    assert {SCALES_OF_ROWS in one.name for one in products if FAST_ACCUMULATION in one.name} == {
        recipe is Float8.ROWWISE
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_checkpointing_fsdp1s_blocks_save_copies_of_their_weights(recipe: Float8) -> None:
    """FSDP1's views are no parameters to the compiler, which saves their copies in float8 instead: a byte each."""

    def saved_by_a_block(api: Api, checkpointing: Checkpointing) -> int:
        setup = replace(SETUP, float8=recipe, api=api, checkpointing=checkpointing)
        found = [memory_of(replace(LLAMA, num_hidden_layers=layers), setup).phases["forward"] for layers in (12, 13)]
        return found[1] - found[0]

    weights = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    more = saved_by_a_block(Api.FSDP1, Checkpointing.NONE) - saved_by_a_block(Api.FSDP2, Checkpointing.NONE)
    assert more == pytest.approx(weights, rel=0.01)
    for checkpointing in (Checkpointing.SELECTIVE, Checkpointing.FULL):
        own, others = (saved_by_a_block(api, checkpointing) for api in (Api.FSDP1, Api.FSDP2))
        assert own == pytest.approx(others, rel=0.001)
