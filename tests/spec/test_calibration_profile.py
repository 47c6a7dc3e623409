"""Calibration files: written, read, refused."""

from pathlib import Path

import pytest

from fsdp_bench.spec.calibration_profile import read_profile, write_profile
from fsdp_bench.spec.errors import SpecError
from tests.conftest import refused, run_command
from tests.rates.test_calibrated import profile


def test_a_written_calibration_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.toml"
    write_profile(profile(1e-6, 1e-4), path)
    assert read_profile(path) == profile(1e-6, 1e-4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("device = ", "is not TOML"),
        ("device = 'cpu'", "has no `"),
        ("schema_version = 99", "calibration of version 99; this fsdp-bench reads up to 1"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(content)
    with pytest.raises(SpecError, match=said):
        read_profile(path)
    assert said in refused("predict", "--model", "gpt2", "--calibration", path)
    with pytest.raises(SpecError, match="fsdp-bench calibrate"):
        read_profile(tmp_path / "none.toml")


def test_predict_says_what_its_time_rests_on(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    write_profile(profile(1e-6, 1e-4), path)
    words = ("predict", "--params", "10M", "--seq", 64, "--world-size", 2, "--calibration", path)
    printed = run_command(*words, "--kernels", "cpu").stdout
    assert "measured on made up, 2026-11-21" in printed
    assert "the calibration was made on made up; use --kernels cpu" in refused(*words)
