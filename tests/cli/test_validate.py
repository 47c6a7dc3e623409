"""``fsdp-bench validate`` and ``report``: what they refuse, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import refused, run_command

RESULTS = Path(__file__).parents[2] / "results" / "xeon-2-cores"
CALIBRATION = RESULTS / "calibration.toml"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((RESULTS, "--page", "x.html"), "a file that ends in .md"),
        (("published",), "'published' is no folder of results; in the clone of fsdp-bench, python -m tools.validate"),
        (("dry-run", "--page", "p.md"), "python -m tools.validate --against dry-run compares"),
    ],
)
def test_what_is_no_folder_of_results_is_refused_in_one_line(words: tuple[object, ...], part: str) -> None:
    assert part in refused("validate", "--against", *words)


def test_report_shows_matrix_rates_or_communication() -> None:
    done = run_command("report", RESULTS / "cpu", "--communication", "--calibration", CALIBRATION)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--calibration is about matrix products" in done.stderr


def test_without_a_calibration_the_line_on_time_says_what_to_give() -> None:
    done = run_command("validate", "--against", RESULTS / "cpu")
    assert "time is not compared: no datasheet has a CPU's rates; give --calibration FILE" in done.stdout
