"""The ranges beside planned speeds are the errors that validate shows."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.ranges import peak_range, prediction_errors, range_of
from fsdp_bench.spec.setup import FP32, Float8, Offload, Precision, TrainSetup
from tools.validate.published import ranges
from tools.validate.published.ranges import central_errors, errors_of_predictions, fraction_inside, speed_errors
from tools.validate.published.speed import SpeedRow, SpeedSummary

SETUP = TrainSetup(world_size=8, precision=Precision("fp32", "bf16", "fp32"))


Compared = tuple[list[SpeedRow], SpeedSummary]


def test_the_file_holds_what_validate_shows(compared: Compared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "compare_speed", lambda: compared)
    assert prediction_errors() == errors_of_predictions()


def test_a_range_is_what_published_runs_reached_and_none_where_nothing_was_compared() -> None:
    found = range_of(BUILT_IN.gpu("H100-SXM"), SETUP)
    errors = prediction_errors().speed
    assert found.slowest * (1 + errors.highest) == pytest.approx(1)
    assert found.fastest * (1 + errors.lowest) == pytest.approx(1)
    assert found.slowest < 1 < found.fastest
    assert f"95% of {errors.num_runs} published runs were predicted" in found.because
    assert "those on H100-SXM are taken to have had CUDA before 12.5" in found.because
    older = range_of(BUILT_IN.gpu("H100-SXM").with_cuda("12.1"), SETUP)
    assert "taken to have had" not in older.because
    for name in ("B200", "MI300X", "H100-PCIe", "H100-NVL", "A10G"):
        assert range_of(BUILT_IN.gpu(name), SETUP) is None


def test_over_pcie_the_slow_end_is_the_slowest_published_run() -> None:
    """A picture of 2022 has 5.5594 s a step of less_2b_bs4; rehearsed it takes 0.64 s (docs/validation.md)."""
    found = range_of(BUILT_IN.gpu("A10G"), SETUP, is_over_pcie=True)
    assert found.slowest == pytest.approx(0.64 / 5.5594, rel=0.01)
    assert found.fastest == 1
    assert not found.is_like_published
    assert range_of(BUILT_IN.gpu("A10G"), msgspec.structs.replace(SETUP, precision=FP32), is_over_pcie=True) is None


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 1},
        {"precision": FP32},
        {"offload": Offload.PARAMS},
        {"activation_offload": True},
        {"float8": Float8.ROWWISE, "compile": True},
    ],
    ids=str,
)
def test_there_is_no_range_for_what_no_published_run_did(change: dict[str, object]) -> None:
    assert range_of(BUILT_IN.gpu("H100-SXM"), msgspec.structs.replace(SETUP, **change)) is None


def test_the_range_holds_for_publishers_that_did_not_make_it() -> None:
    """Neither too narrow nor so wide that it says nothing: 80 to 95 % of the rows of a publisher that is left out."""
    assert 0.80 <= fraction_inside(prediction_errors().speed) <= 0.95


def test_the_range_of_a_publisher_that_is_left_out_does_not_depend_on_its_rows(compared: Compared) -> None:
    rows = [row for row in compared[0] if row.error is not None]
    ibm = [msgspec.structs.replace(row, error=9.0) if row.family == "ibm-fms-fsdp" else row for row in rows]
    assert speed_errors(ibm).held_out["ibm-fms-fsdp"].inside == 0
    others = [row for row in rows if row.family != "ibm-fms-fsdp"]
    assert central_errors(others) == central_errors(row for row in ibm if row.family != "ibm-fms-fsdp")


def test_a_peak_has_the_range_of_published_peaks() -> None:
    found = peak_range(compiled=False)
    assert found.lowest <= 1 < found.highest
    assert "published eager peaks" in found.because
