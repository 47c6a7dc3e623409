"""Rehearsals of published runs: every record is of a published row, and says what was published."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.units import GIB
from tools.validate.published.cases import PublishedCase
from tools.validate.published.rehearsed import (
    Code,
    RehearsedRecord,
    compare_rehearsed,
    compare_rehearsed_outcomes,
    compare_rehearsed_speeds,
    format_rehearsed,
    read_rehearsed,
    summarize,
)

FOLDER = Path(__file__).parents[3] / "results" / "rehearsed" / "published"
RECORDS = read_rehearsed(FOLDER / "records")


def _record(**changes: object) -> RehearsedRecord:
    fields = {
        "case": "a",
        "variant": None,
        "is_first": True,
        "code": Code(repository="https://github.com/a/b", commit="0123456789abcdef", note="then"),
        "torch": "2.4.0+cu121",
        "changes": "the data",
        "left_open": "nothing",
        "published": {"max_active": 10 * GIB, "max_reserved": 20 * GIB},
        "peaks": {"max_allocated": 9 * GIB, "max_active": 10 * GIB, "max_reserved": 19 * GIB},
        **changes,
    }
    return from_json(to_json(fields), RehearsedRecord)


def test_records_hold_what_the_packaged_rows_say(cases: dict[str, PublishedCase]) -> None:
    for record in RECORDS:
        case = cases[record.case]
        assert record.published == {one.kind: one.num_bytes for one in case.measured}
        assert record.published_outcome == case.outcome
        assert record.published_tokens_per_second in (None, case.tokens_per_second_per_gpu)
    assert sum(record.published_tokens_per_second is not None for record in RECORDS) >= 10


def test_every_listed_run_has_its_record() -> None:
    table = tomllib.loads((FOLDER / "rows.toml").read_text())
    listed = {
        (row["case"], torch, variant)
        for row in table["case"]
        for variant in (None, *row.get("variants", ()))
        for torch in row["torch"]
    }
    assert {(one.case, one.torch.partition("+")[0], one.variant) for one in RECORDS} == listed
    first = {(row["case"], row["torch"][0]) for row in table["case"]}
    assert {(one.case, one.torch.partition("+")[0]) for one in RECORDS if one.is_first} == first
    assert {row["case"]: table["code"][row["code"]]["commit"] for row in table["case"]} == {
        one.case: one.code.commit for one in RECORDS
    }


def test_no_record_names_a_file_of_the_machine() -> None:
    for file in (FOLDER / "records").iterdir():
        text = file.read_text()
        assert not [part for part in ("/tmp", "/home", "/root", "/work") if part in text], file.name


def test_a_peak_is_compared_with_the_peak_of_its_kind() -> None:
    active, reserved = compare_rehearsed([_record()])
    assert (active.kind, active.difference_bytes, active.error) == ("max_active", 0, 0.0)
    assert (reserved.kind, reserved.difference_bytes, reserved.error) == ("max_reserved", -GIB, -0.05)


def test_the_summary_counts_both_limits_and_names_the_worst() -> None:
    found = summarize(compare_rehearsed([_record()]))
    assert (found.num_peaks, found.num_within, found.num_within_bytes) == (2, 1, 1)
    assert found.worst.kind == "max_reserved"


def test_the_text_has_every_peak_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    peaks = compare_rehearsed([_record(), _record(variant="fused", is_first=False)])
    first, other = (summarize([peak for peak in peaks if peak.is_first is flag]) for flag in (True, False))
    text = format_rehearsed([_record()], peaks, first, other, [], [])
    assert "a, fused" in text
    assert "a/b at 012345678, then" in text
    assert "-5.00%" in text
    assert "1 of 2 within 1%, 1 within 0.15 GiB; worst -5.0%, -1.00 GiB, a" in " ".join(text.split())
    speeds, outcomes = compare_rehearsed_speeds(RECORDS), compare_rehearsed_outcomes(RECORDS)
    whole = format_rehearsed(RECORDS, compare_rehearsed(RECORDS), first, other, speeds, outcomes)
    assert max(map(len, whole.splitlines())) <= 80


def test_a_speed_is_compared_where_it_is_published_and_rehearsed() -> None:
    speeds = {"published_tokens_per_second": 100.0, "tokens_per_second": 110.0}
    further = {"is_first": False, "torch": "2.6.0"}
    unknown = {"case": "b", "published_tokens_per_second": 100.0}
    found = compare_rehearsed_speeds([_record(**speeds), _record(**speeds, **further), _record(**unknown), _record()])
    assert [(one.case, one.torch, one.error) for one in found] == [("a", "2.4.0+cu121", pytest.approx(0.1))]
    text = format_rehearsed([], [], *2 * [summarize([])], found, [])
    assert "median |error| 10.0%, worst +10.0%, a; too fast in 1 of 1" in text


def test_no_published_outcome_is_wrongly_accepted_or_refused() -> None:
    found = compare_rehearsed_outcomes(RECORDS)
    assert [(one.case, one.verdict) for one in found if not one.ran] == [("less_2b_bs24", Verdict.DOES_NOT_FIT)]
    assert [one.case for one in found if one.ran and one.verdict is Verdict.DOES_NOT_FIT] == []
    assert len(found) == len({one.case for one in found}) == 26


def test_outcomes_are_counted_by_verdict() -> None:
    ran = {"published_outcome": "fits", "verdict": "runs_with_retries"}
    full = {"published_outcome": "OOM", "verdict": "fits"}
    found = compare_rehearsed_outcomes([_record(**ran), _record(**full), _record(**ran, is_first=False), _record()])
    lines = format_rehearsed([], [], *2 * [summarize([])], [], found).splitlines()
    counts = [line.split()[-2:] for line in lines if line.startswith(("  fits", "  runs", "  does"))]
    assert counts == [["0", "1"], ["1", "0"], ["0", "0"]]


def test_a_folder_without_records_and_a_broken_one_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no records of rehearsals"):
        read_rehearsed(tmp_path)
    (tmp_path / "a.json").write_text('{"case": 1}')
    with pytest.raises(SpecError, match="holds a file that is no such record"):
        read_rehearsed(tmp_path)


def test_a_published_peak_without_a_rehearsed_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(to_json(_record(peaks={})))
    with pytest.raises(SpecError, match="not all rehearsed ones"):
        read_rehearsed(tmp_path)
