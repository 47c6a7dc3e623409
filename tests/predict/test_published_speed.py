"""Published throughput: the model of time against rows that no constant of it was fitted to."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_bench.predict.published import read_cases
from fsdp_bench.predict.published_speed import JUDGED, compare_speed
from tests.conftest import run_command


@pytest.fixture(scope="module")
def compared():  # type: ignore[no-untyped-def]
    """Compare once."""
    return compare_speed()


def test_the_median_error_is_at_most_a_tenth_and_below_the_best_constant_mfus(compared) -> None:  # type: ignore[no-untyped-def]
    rows, summary = compared
    assert summary.num_rows >= 48
    assert summary.median_error <= 0.10
    assert summary.median_error < summary.median_error_of_constant_mfu
    assert {row.family for row in rows if row.error is not None} == set(JUDGED)


def test_nothing_measured_decides_a_prediction() -> None:
    """Halved published throughput moves the errors and no prediction."""
    cases = [case for case in read_cases() if case.inputs.family in JUDGED]
    rows, _ = compare_speed(cases)
    halved = [
        msgspec.structs.replace(case, tokens_per_second_per_gpu=case.tokens_per_second_per_gpu / 2)
        for case in cases
        if case.tokens_per_second_per_gpu is not None
    ]
    others, _ = compare_speed(halved)
    assert [row.predicted_tokens_per_second for row in rows] == [row.predicted_tokens_per_second for row in others]
    for row, other in zip(rows, others, strict=True):
        if row.error is not None and other.error is not None:
            assert 1 + other.error == pytest.approx(2 * (1 + row.error))


def test_every_judged_row_is_predicted_or_says_why(compared) -> None:  # type: ignore[no-untyped-def]
    rows, _ = compared
    assert all((row.error is None) != (row.reason is None) for row in rows)
    assert all(row.assumptions for row in rows if row.error is not None)


def test_the_command_prints_both_beside_each_other() -> None:
    told = run_command("validate", "--against", "published").stdout
    assert "predicted against published throughput: 48 rows" in told
    assert "mpt_7b_a100_80gb_8g_s16384_mb4_ac" in told
    assert "constant MFU" in told
    found = msgspec.json.decode(run_command("validate", "--against", "published", "--json").stdout)
    assert found["throughput"]["summary"]["num_rows"] == 48
    assert found["memory"]
