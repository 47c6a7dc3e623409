"""Time, FLOPs and tokens of a step written by hand; expected numbers follow from datasheets and shapes."""

from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.catalog.lookup import find_placement
from fsdp_bench.plan.rehearsed_time.answer import RehearsedTime, rehearsed_time_document, rehearsed_times, why_no_time
from fsdp_bench.rates.collectives import collective_seconds, topology_of_ranks
from fsdp_bench.rates.datasheet import KERNEL_SECONDS, LAUNCH_SECONDS, MEMORY_EFFICIENCY
from fsdp_bench.rates.scaled import SCALED, product_flops_per_second
from fsdp_bench.replay.step_parts import StepPart
from fsdp_bench.spec.calibration_profile import Scaling
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.subprocesses.rehearsal import RehearsalReport
from tests.plan.rehearsed_time.conftest import INT64, StepWriter
from tests.report.test_rehearsal_text import REPORT

EIGHT = tuple(range(8))


def report(step: StepWriter | None, num_steps: int = 4, **more: Any) -> RehearsalReport:
    return replace(REPORT, num_steps=num_steps, issued=None if step is None else step.read(), **more)


def answer(
    step: StepWriter,
    server: str | None = "p5.48xlarge",
    tokens: int | None = None,
    power: str | None = None,
    **more: Any,
) -> RehearsedTime:
    catalog = BUILT_IN.under_power(power)
    place = find_placement(None if server else "H100-SXM", server, None, None, None if server else 8, catalog)
    return rehearsed_times([report(step, **more)], place.hardware, tokens)[REPORT.rank]


def test_an_operator_takes_its_bytes_over_the_memorys_bandwidth(step: StepWriter) -> None:
    step.operator("aten::neg", (step.tensor(10**9),), self=(step.tensor(10**9),))
    found = answer(step)
    seconds = 4e9 / (3.35e12 * MEMORY_EFFICIENCY) + KERNEL_SECONDS  # an H100's 3.35 TB/s
    assert found.time.step_seconds == pytest.approx(seconds + LAUNCH_SECONDS)
    assert found.waiting_for_host_seconds == pytest.approx(LAUNCH_SECONDS)
    assert found.host_seconds == pytest.approx(LAUNCH_SECONDS)
    assert [(part.name, part.kind, part.count) for part in found.parts] == [("aten::neg", "compute", 1)]


def test_what_runs_in_the_optimizers_step_is_the_optimizers_part(step: StepWriter) -> None:
    """Whatever it is called: _foreach_ and _fused_ operators, and a product of Muon's; before the step it is not."""
    step.add("phase", name="backward")
    step.operator("aten::neg", (step.tensor(10**9),), self=(step.tensor(10**9),))
    step.add("phase", name="optimizer")
    step.operator("aten::neg", (step.tensor(10**9),), self=(step.tensor(10**9),))
    step.product(1024, 1024, 1024)
    found = answer(step)
    by_name = {part.name: part.seconds for part in found.parts}
    in_optimizer = found.time.parts[StepPart.OPTIMIZER]
    assert in_optimizer == pytest.approx(sum(by_name.values()) - by_name["aten::neg"] / 2)
    assert found.time.parts[StepPart.MATRIX_PRODUCTS] == 0
    assert found.time.step_seconds == pytest.approx(sum(found.time.parts.values()))


def test_a_collective_takes_what_nccls_model_says_for_its_group(step: StepWriter) -> None:
    step.collective("allgather_base", 10**9, EIGHT)
    cluster = find_placement(None, "p5.48xlarge", None, None, None, BUILT_IN).hardware
    topology = topology_of_ranks(cluster, EIGHT)
    expected = collective_seconds("all_gather", 10**9, topology)
    assert answer(step).time.step_seconds == pytest.approx(expected + LAUNCH_SECONDS)


def test_without_a_server_collectives_are_unknown_and_all_else_has_its_time(step: StepWriter) -> None:
    step.operator("aten::neg", (step.tensor(10**6),), self=(step.tensor(10**6),))
    step.collective("allgather_base", 10**9, EIGHT)
    found = answer(step, server=None)
    assert found.unknown == {"all_gather of 8 ranks": 1}
    assert (found.time.step_seconds, found.mfu, found.tokens_per_second_per_gpu) == (None, None, None)
    assert found.at_least_seconds == pytest.approx(
        4e6 / (3.35e12 * MEMORY_EFFICIENCY) + KERNEL_SECONDS + LAUNCH_SECONDS
    )


def phases(step: StepWriter) -> None:
    """A product of 1 GFLOP forward, again in backward, and two for its gradients; and one of an optimizer."""
    step.product(1000, 1000, 500)
    step.add("phase", name="backward")
    step.product(1000, 1000, 500, is_recomputed=True)
    step.product(1000, 500, 1000)
    step.product(500, 1000, 1000)
    step.add("phase", name="optimizer")
    step.product(1000, 1000, 500)


def test_mfu_leaves_out_what_was_recomputed_and_the_optimizer(step: StepWriter) -> None:
    phases(step)
    found = answer(step)
    assert (found.model_flops, found.hardware_flops) == (3e9, 4e9)
    peak = 989.4e12  # an H100's dense peak in bf16
    assert found.mfu == pytest.approx(3e9 / found.time.step_seconds / peak, rel=1e-3)
    assert found.hfu == pytest.approx(found.mfu * 4 / 3)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_compiled_code_computes_again_what_reads_the_same_as_in_forward(step: StepWriter, is_compiled: bool) -> None:
    x, weight, y = step.tensor(1000, 500), step.tensor(500, 1000, strides=(1, 500)), step.tensor(1000, 1000)
    step.operator("aten::mm", (y,), self=(x,), mat2=(weight,))
    step.add("phase", name="backward")
    if is_compiled:
        nothing = dict.fromkeys(("names", "arguments", "changed", "sizes"), ())
        step.add("triton", name="triton_poi_fused_0", is_inductors=True, module="", stream=0, **nothing)
    step.operator("aten::mm", self=(x,), mat2=(weight,), out=(y,), outputs=("out",))
    step.product(1000, 500, 1000)
    step.product(500, 1000, 1000)
    found = answer(step)
    assert (found.model_flops, found.hardware_flops) == (3e9 if is_compiled else None, 4e9)


def test_mfu_is_unknown_where_gradients_seem_to_need_more_than_twice_the_forward(step: StepWriter) -> None:
    phases(step)
    step.events[-1] = {"kind": "phase", "name": "backward"}
    step.product(1000, 1000, 500)
    found = answer(step)
    assert (found.model_flops, found.mfu) == (None, None)
    assert found.hardware_flops == 5e9


def embedding(step: StepWriter, rows: int, count: int, **more: Any) -> None:
    out, weight, indices = step.tensor(count, 16), step.tensor(rows, 16), step.tensor(count, dtype=INT64)
    step.operator("aten::embedding", (out,), weight=(weight,), indices=(indices,), **more)


def test_tokens_are_what_the_embedding_looked_up_in_all_micro_batches(step: StepWriter) -> None:
    for _ in range(2):
        embedding(step, 1000, 256)
        embedding(step, 512, 128)  # positions
        embedding(step, 1000, 256, is_recomputed=True)
    found = answer(step)
    assert found.tokens_per_step == 512
    assert answer(step, tokens=100).tokens_per_step == 100
    assert found.tokens_per_second_per_gpu == pytest.approx(512 / (found.time.step_seconds or 0.0))


def test_the_document_has_predicts_keys_and_adds_nothing_up_wrongly(step: StepWriter) -> None:
    phases(step)
    document = to_builtins(rehearsed_time_document(answer(step)))
    for key in ("step_seconds", "compute_seconds", "communication_seconds", "exposed_communication_seconds",
                "host_copy_seconds", "tokens_per_second_per_gpu", "mfu", "hfu", "rates", "unknown"):  # fmt: skip
        assert key in document
    assert sum(part["seconds"] for part in document["parts"]) == pytest.approx(document["compute_seconds"])


def test_a_time_needs_a_whole_step_after_the_first() -> None:
    assert rehearsed_times([report(None)], Hardware.of_gpu(BUILT_IN.gpu("H100-SXM"))) == {}
    assert "made 1" in why_no_time(report(None, num_steps=1))
    assert why_no_time(report(None, spans=())) == "the script never used the GPU"
    assert why_no_time(report(None, why_nothing_issued="because")) == "because"


def test_the_cuda_of_the_rehearsed_torch_decides_how_fast_it_multiplies_and_which_attention_it_takes() -> None:
    """Before 12.5 an H100's entry has another rate of products; before 13.0 torch takes FlashAttention-2."""
    step, gpu = StepWriter(), BUILT_IN.gpu("H100-SXM")
    heads = {name: (step.tensor(2, 16, 4096, 128),) for name in ("query", "key", "value")}
    step.operator(
        "aten::_scaled_dot_product_flash_attention", (step.tensor(2, 16, 4096, 128),), is_causal=True, **heads
    )
    step.product(4096, 8192, 8192)
    seconds = {
        cuda: {part.name: part.seconds for part in answer(step, cuda=cuda).parts} for cuda in ("12.1", "12.8", "13.0")
    }
    products = {cuda: found["aten::mm nn"] - KERNEL_SECONDS for cuda, found in seconds.items()}
    assert products["12.8"] == pytest.approx(products["13.0"])
    assert products["12.1"] / products["13.0"] == pytest.approx(
        gpu.matmul_efficiency / gpu.older_cublas.matmul_efficiency
    )
    attention = {cuda: found["aten::scaled_dot_product_attention"] - KERNEL_SECONDS for cuda, found in seconds.items()}
    assert attention["12.1"] == pytest.approx(attention["12.8"])
    assert attention["12.8"] / attention["13.0"] == pytest.approx(591 / 319)


def test_a_power_limit_slows_products_down_whichever_cuda_was_rehearsed() -> None:
    """At 500 W an older cuBLAS's reach what the power allows, too: (500 - 72) / (700 - 72) of the newer one's."""
    step = StepWriter()
    step.product(4096, 8192, 8192)
    seconds = [
        answer(step, cuda=cuda, power=power).parts[0].seconds
        for cuda, power in (("13.0", None), ("13.0", "500W"), ("12.1", "500W"))
    ]
    assert seconds[1] / seconds[0] == pytest.approx(628 / 428, rel=1e-3)
    assert seconds[2] == pytest.approx(seconds[1], rel=2e-3)


# -- several dimensions of parallelism ---------------------------------------------------------------------------------


def looks_up(step: StepWriter, tokens: int) -> None:
    weight, indices = step.tensor(100, 8), step.tensor(tokens, dtype=INT64)
    step.operator("aten::embedding", (step.tensor(tokens, 8),), weight=(weight,), indices=(indices,))


GROUPS: dict[str, tuple[list[tuple[int, ...]], float | None]] = {
    "FSDP alone": ([EIGHT], 1),
    "hybrid sharding": ([(0, 1, 2, 3), (0, 4)], 1),
    "tensor parallelism of 2": ([(0, 2, 4, 6)], 2),
    "2 stages, each with hybrid sharding": ([(0, 1), (0, 2)], 2),
    "experts are sharded over some of the ranks that have tokens of their own": ([EIGHT, (0, 4)], 1),
}


@pytest.mark.parametrize(("reduces", "sharing"), GROUPS.values(), ids=GROUPS)
def test_ranks_have_tokens_of_their_own_where_their_gradients_are_reduced(
    step: StepWriter, reduces: list[tuple[int, ...]], sharing: float
) -> None:
    looks_up(step, 512)
    step.product(64, 64, 64)
    for number, ranks in enumerate(reduces):
        step.collective("reduce_scatter_base", 100, ranks, group=str(number), stream=70)
    step.collective("allgather_base", 100, (0, 1), group="tensor parallel")
    found = answer(step)
    assert (found.sharing_ranks, found.tokens_per_step) == (sharing, 512 / sharing)
    assert (found.range is None) == (sharing != 1)  # no published run had tensor or pipeline parallelism


Collectives = list[tuple[tuple[int, ...], int]]

WITHOUT_FSDP: dict[str, tuple[Collectives, Collectives, float | None]] = {  # an embedding has 800 numbers
    "DDP": ([], [(EIGHT, 1000)], 1),
    "DDP of adapters, which are small; a loss is reduced in forward": ([(EIGHT, 4)], [(EIGHT, 10)], 1),
    "tensor parallelism alone": ([(EIGHT, 4096)], [(EIGHT, 4096)], 8),
    "tensor parallelism alone, with gradients of norms and their length": (
        [(EIGHT, 4096)], [(EIGHT, 4096), (EIGHT, 16), (EIGHT, 4)], 8,
    ),
    "tensor parallelism of 2 with DDP": ([((0, 1), 4096)], [((0, 1), 4096), ((0, 2, 4, 6), 100)], 2),
    "parts of a sequence gathered in forward, with DDP": ([(EIGHT, 4096)], [(EIGHT, 4096), (EIGHT, 1600)], 1),
    "a part of the ranks gathers, and nobody reduces": ([((0, 1), 4096)], [((0, 1), 4096)], None),
    "half of the ranks reduce, and nobody says what the others do": ([], [((0, 1, 2, 3), 1000)], None),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "backward", "sharing"), WITHOUT_FSDP.values(), ids=WITHOUT_FSDP)
def test_without_fsdp_ranks_that_communicate_in_forward_share_tokens(
    step: StepWriter, forward: Collectives, backward: Collectives, sharing: float | None
) -> None:
    looks_up(step, 512)
    for ranks, num_bytes in forward:
        step.collective("allreduce", num_bytes, ranks, group=str(ranks))
    step.add("phase", name="backward")
    for ranks, num_bytes in backward:
        step.collective("allreduce", num_bytes, ranks, group=str(ranks))
    found = answer(step)
    assert (found.sharing_ranks, found.tokens_per_step) == (sharing, None if sharing is None else 512 / sharing)
    assert answer(step, tokens=100).tokens_per_step == 100


def stage(rank: int, products: int) -> RehearsalReport:
    """One of two stages: rank 0 sends to rank 4 what that has products for, and waits for the answer."""
    step, other = StepWriter(), 4 - rank
    given = {"peer": other, "is_asynchronous": True, "group": "pp"}
    ways = ("send", "recv") if rank == 0 else ("recv", "send")
    for number, way in enumerate(ways):
        step.collective(way, 10**6, (0, 4), number=number, batch=number, **given)
        step.add("collectives_wait", stream=0, number=number)
        for _ in range(products if way == "recv" else 0):
            step.product(4096, 4096, 4096)
    return report(step, rank=rank, peers=(other,))


def test_stages_take_as_long_as_they_wait_for_each_other() -> None:
    where = find_placement(None, "p5.48xlarge", None, None, None, BUILT_IN).hardware
    first, second = stage(0, 1), stage(4, 3)
    found = rehearsed_times([first, second], where)
    product = next(part.seconds for part in found[0].parts if part.kind == "compute")
    message = collective_seconds("send_recv", 10**6, topology_of_ranks(where, (0, 4)))
    for one in found.values():
        assert one.time.step_seconds == pytest.approx(4 * product + 2 * message, abs=10 * LAUNCH_SECONDS)
        assert (one.stages, one.sharing_ranks) == ((0, 4), 8)  # of 8 ranks, of which nobody reduces gradients
    assert found[0].time.parts[StepPart.WAITING_FOR_RANKS] == pytest.approx(3 * product, abs=10 * LAUNCH_SECONDS)
    alone = rehearsed_times([first], where)[0]
    assert (alone.time.step_seconds, alone.waits_for) == (None, (4,))
    assert alone.at_least_seconds == pytest.approx(product + 2 * message, abs=10 * LAUNCH_SECONDS)


def test_a_run_of_ones_own_scales_what_a_script_issued_and_a_host_its_launches(step: StepWriter) -> None:
    step.operator("aten::neg", (step.tensor(10**9),), self=(step.tensor(10**9),))
    gpu = BUILT_IN.gpu("H100-SXM")
    run = Scaling(
        measured_on="2026-11-27",
        source="by hand",
        gpu="H100-SXM",
        datasheet_flops_per_second=product_flops_per_second(gpu),
        factors={"other_operators": 1.5},
        launch_seconds=3e-5,
    )
    before, found = (rehearsed_times([report(step)], Hardware.of_gpu(gpu), None, one)[0] for one in (None, run))
    kernel = (before.time.step_seconds or 0.0) - LAUNCH_SECONDS
    assert found.time.step_seconds == pytest.approx(1.5 * kernel + 3e-5)
    assert found.source == SCALED
    assert found.range is None
