"""``validate --against published``, on a few of the packaged rows."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_bench.cli.main import cli
from fsdp_bench.validate.published import cases as published_cases

SOME = (
    "pr165_FSDP1_full_eager",
    "ibm_7b_A100_compile-yes",
    "mpt_7b_a100_80gb_8g_s4096_mb16_ac",
    "mpt_7b_h100_80gb_8g_s2048_mb6",
    "less_2b_bs24",
)


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in published_cases.packaged_rows() if row["id"] in SOME]
    monkeypatch.setattr(published_cases, "packaged_rows", lambda: rows)


def _run(*words: str) -> int:
    code: int = cli.main(["validate", "--against", "published", *words], standalone_mode=False)
    return code


def test_peaks_fits_and_throughput_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _run() == 0
    text = capsys.readouterr().out
    assert "peaks of memory: 2 published, 2 compared" in text
    assert "does it fit: 5 published outcomes, 4 compared" in text
    assert "throughput: 4 published, 4 compared" in text
    assert "range: 95% of the errors are between" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_the_json_document_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--json") == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert {row["case"] for row in found["fits"]} == set(SOME)
    assert found["throughput"]["summary"]["num_rows"] == 4
    assert found["throughput"]["summary"]["num_left_out"] == 0
    assert set(found["throughput"]["summary"]["best_constant_mfu"]) == {"A100", "H100"}
    assert {row["case"] for row in found["memory"]} == set(SOME)
