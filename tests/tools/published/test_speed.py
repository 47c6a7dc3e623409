"""Published throughput, predicted from datasheets or left out with the reason; the ranges that plans take from it."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.measured_run import MeasuredRun
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.plan.ranges import peak_range, prediction_errors, range_of
from fsdp_bench.plan.scaling import scale_rates
from fsdp_bench.rates.attention_time import FLASH_ATTENTION_2, TRITON, fraction_of_peak
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import FP32, Float8, Offload, Precision, TrainSetup
from tools.validate.published import cases as published_cases
from tools.validate.published import own_run, ranges
from tools.validate.published.cases import PublishedCase, cluster_of, read_cases
from tools.validate.published.ranges import errors_of_predictions, expected_errors, fraction_inside, speed_errors
from tools.validate.published.setups import FRAMEWORKS, plan_case
from tools.validate.published.speed import COMPARED, SpeedRow, SpeedSummary, compare_speed

Compared = tuple[list[SpeedRow], SpeedSummary]
"""Every published throughput with its prediction, and the summary."""
compared = pytest.fixture(compare_speed, scope="module")


def test_the_median_error_is_small_on_every_gpu_and_below_the_best_constant_mfus(compared: Compared) -> None:
    """Within a tenth for each publisher on each GPU; a constant MFU is chosen afterwards, and yet further off."""
    rows, summary = compared
    assert summary.num_rows == 66
    assert {row.family for row in rows if row.error is not None} == set(COMPARED)
    groups: dict[tuple[str, str], list[SpeedRow]] = {}
    for row in rows:
        if row.error is not None:
            groups.setdefault((row.family, row.gpu), []).append(row)
    assert len(groups) == 7
    for name, group in groups.items():
        assert median(abs(row.error or 0.0) for row in group) <= 0.10, name
    for gpu in ("A100", "H100"):
        on_gpu = [row for row in rows if row.error is not None and row.gpu == gpu]
        ours, constant = (median(abs(getattr(row, name)) for row in on_gpu) for name in ("error", "constant_mfu_error"))
        assert ours < constant


def test_nothing_measured_decides_a_prediction(compared: Compared) -> None:
    """Halved published throughput moves the errors and no prediction; here of every fourth row that was measured."""
    measured = [case for case in read_cases() if case.tokens_per_second_per_gpu is not None]
    halved = [
        msgspec.structs.replace(case, tokens_per_second_per_gpu=(case.tokens_per_second_per_gpu or 0.0) / 2)
        for case in measured[::4]
    ]
    others, _ = compare_speed(halved)
    rows = compared[0][::4]
    assert [row.case for row in rows] == [other.case for other in others]
    assert sum(row.error is not None for row in rows) > 10
    for row, other in zip(rows, others, strict=True):
        assert row.predicted_tokens_per_second == other.predicted_tokens_per_second
        if row.error is not None and other.error is not None:
            assert 1 + other.error == pytest.approx(2 * (1 + row.error))


def test_torchtitans_runs_on_cards_of_500_w_are_predicted_within_6_percent(compared: Compared) -> None:
    """Eager and compiled, December 2024: nothing was fitted to them, nor to any other run of such a card."""
    errors = {row.case: row.error for row in compared[0] if row.family == "torchtitan-h100-202412"}
    assert set(errors) == {"tt_l31_8b_8g_eager", "tt_l31_8b_8g_compile"}
    assert all(error is not None and abs(error) <= 0.06 for error in errors.values())


def test_triton_is_slower_than_flash_attention_2_on_the_same_gpu() -> None:
    """An H100 must not run Triton's FlashAttention faster than torch's FlashAttention-2."""
    for capability in (8.0, 9.0):
        for is_backward, factor in ((False, 1.4), (True, 2.0)):
            rates = [
                fraction_of_peak(name, capability, 128, True, 4096, is_backward) for name in (TRITON, FLASH_ATTENTION_2)
            ]
            assert rates[0] == pytest.approx((rates[1] or 0.0) / factor)


def test_recomputed_products_cost_time(cases: dict[str, PublishedCase], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan recomputes wk, wo and w3: T (2 D^2 + D F) of the 3 T (4 D^2 + 3 D F) that a block's products take.

    A step is more than products, so it gets slower by less than that share; they are most of it, so by more than half.
    """
    case = cases["pr165_FSDP2_selective_op_eager"]
    (done,), _ = compare_speed([case])
    keeps_all = replace(FRAMEWORKS[case.inputs.family], recomputes_every_second_product=None)
    monkeypatch.setitem(FRAMEWORKS, case.inputs.family, keeps_all)
    (without,), _ = compare_speed([case])
    width, feed_forward = 4096, 11008
    share = (2 * width**2 + width * feed_forward) / (3 * (4 * width**2 + 3 * width * feed_forward))
    slower = without.predicted_tokens_per_second / done.predicted_tokens_per_second - 1
    assert share / 2 < slower < share


def test_the_packaged_table_names_no_file_outside_of_the_repository() -> None:
    assert "../" not in (Path(published_cases.__file__).parent / "published.csv").read_text(encoding="utf-8")


SETUP = TrainSetup(world_size=8, precision=Precision("fp32", "bf16", "fp32"))


def _lone(gpu: str) -> Hardware:
    return Hardware.of_gpu(BUILT_IN.gpu(gpu))


def test_the_file_holds_what_validate_shows(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "compare_speed", lambda: compared)
    assert prediction_errors() == errors_of_predictions()


def test_a_range_is_what_published_runs_leave_and_wide_where_nothing_was_compared() -> None:
    found = range_of(_lone("H100-SXM"), SETUP)
    errors = prediction_errors().speed
    lowest, highest = errors.nodes["one node"]
    assert found.slowest * (1 + highest) == pytest.approx(1)
    assert found.fastest * (1 + lowest) == pytest.approx(1)
    assert found.slowest < 1 < found.fastest
    assert f"by {errors.num_runs} published runs of {len(errors.families)}" in found.because
    assert "those on H100-SXM are taken to have had CUDA before 12.5" in found.because
    older = range_of(Hardware.of_gpu(BUILT_IN.gpu("H100-SXM").with_cuda("12.1")), SETUP)
    assert "taken to have had" not in older.because
    for name in ("B200", "MI300X", "H100-PCIe", "H100-NVL", "A10G"):
        wide = range_of(_lone(name), SETUP)
        assert (wide.slowest, wide.is_like_published) == (0.3, False)
        assert wide.because.startswith(f"no run on {name} was ever compared")
    assert range_of(_lone("H200-SXM"), SETUP).is_like_published  # an H100's chip


def test_runs_on_several_nodes_have_a_wider_range() -> None:
    """The network between nodes, and how many GPUs wait for each other, differ more than what is in one."""
    server = BUILT_IN.server("p5.48xlarge")
    one, two = (
        range_of(Hardware(server=server, gpu=BUILT_IN.gpu(server.gpu), num_nodes=nodes, gpus_per_node=8), SETUP)
        for nodes in (1, 2)
    )
    assert two.slowest < one.slowest < 1 < one.fastest < two.fastest
    assert "on several nodes" in two.because


def test_over_pcie_the_slow_end_is_the_slowest_published_run() -> None:
    """A picture of 2022 has 5.5594 s a step of less_2b_bs4; rehearsed it takes 0.64 s (docs/validation.md)."""
    found = range_of(_lone("A10G"), SETUP, is_over_pcie=True)
    assert found.slowest == pytest.approx(0.64 / 5.5594, rel=0.01)
    assert found.fastest == 1
    assert not found.is_like_published
    fp32 = msgspec.structs.replace(SETUP, precision=FP32)
    assert "no run on A10G" in range_of(_lone("A10G"), fp32, is_over_pcie=True).because


@pytest.mark.parametrize(
    ("change", "unlike"),
    [
        ({"world_size": 1024}, "on more than 512 GPUs"),
        ({"precision": FP32}, "in fp32"),
        ({"offload": Offload.PARAMS}, "with offload"),
        ({"activation_offload": True}, "with offload"),
        ({"float8": Float8.ROWWISE, "compile": True}, "in float8"),
    ],
    ids=str,
)
def test_what_no_published_run_did_has_a_wide_range_that_says_so(change: dict[str, object], unlike: str) -> None:
    found = range_of(_lone("H100-SXM"), msgspec.structs.replace(SETUP, **change))
    assert f"no run {unlike} was ever compared" in found.because
    assert not found.is_like_published


def test_the_range_holds_for_publishers_that_did_not_make_it() -> None:
    """Neither too narrow nor so wide that it says nothing: 88 to 97 % of the rows of a publisher that is left out."""
    assert 0.88 <= fraction_inside(prediction_errors().speed) <= 0.97


def test_the_range_of_a_publisher_that_is_left_out_does_not_depend_on_its_rows(compared: Compared) -> None:
    rows = [row for row in compared[0] if row.error is not None]
    ibm = [msgspec.structs.replace(row, error=9.0) if row.family == "ibm-fms-fsdp" else row for row in rows]
    assert speed_errors(ibm).held_out["ibm-fms-fsdp"].inside == 0
    others = [row for row in rows if row.family != "ibm-fms-fsdp"]
    assert expected_errors(others) == expected_errors(row for row in ibm if row.family != "ibm-fms-fsdp")


def test_a_peak_has_the_range_of_published_peaks() -> None:
    found = peak_range(compiled=False)
    assert found.lowest <= 1 < found.highest
    assert "published eager peaks" in found.because


def test_the_page_has_how_well_one_run_predicts_its_publishers_others(compared: Compared) -> None:
    page = (Path(__file__).parents[3] / "docs" / "validation" / "time.md").read_text(encoding="utf-8")
    assert "\n".join(own_run.markdown(compared[0])) in page


def test_a_run_that_scales_the_rates_divides_the_errors_of_others_by_its_own(
    compared: Compared, cases: dict[str, PublishedCase]
) -> None:
    """As the ranges take it; operators beside collectives do not slow down quite in proportion."""
    by_case = {row.case: row for row in compared[0]}
    names = ("pr165_FSDP2_compile_none", "pr165_FSDP2_compile_SAC", "pr165_FSDP2_compile_AC_reuse")

    def asked(name: str) -> Question:
        plan, inputs = plan_case(cases[name].inputs), cases[name].inputs
        gpu = cluster_of(inputs).gpu.with_cuda("12.1")
        question = Question(plan.model, plan.setup, msgspec.structs.replace(cluster_of(inputs), gpu=gpu))
        return question.with_steps(SimulatedSteps(plan.model, plan.setup, plan.kernels))

    tokens = by_case[names[0]].published_tokens_per_second
    scaling = scale_rates(asked(names[0]), MeasuredRun("by hand", tokens_per_second=tokens)).scaling
    for name in names[1:]:
        found = speed_of(asked(name).on_same_steps(profile=scaling)).tokens_per_second_per_gpu
        expected = (1 + (by_case[name].error or 0.0)) / (1 + (by_case[names[0]].error or 0.0))
        assert found / by_case[name].published_tokens_per_second == pytest.approx(expected, rel=5e-3)
