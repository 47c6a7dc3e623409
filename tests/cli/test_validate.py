"""``fsdp-bench validate`` and ``report``: what they refuse, in one line."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import run_command

RESULTS = Path(__file__).parents[2] / "results" / "xeon-2-cores"
CALIBRATION = RESULTS / "calibration.toml"


def test_without_a_calibration_the_line_on_time_says_what_to_give() -> None:
    done = run_command("validate", "--against", RESULTS / "cpu")
    assert "time is not compared: no datasheet has a CPU's rates; give --calibration FILE" in done.stdout
