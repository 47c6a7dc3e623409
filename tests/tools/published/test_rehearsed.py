"""Rehearsals of published runs: every record is of a published row, and says what was published.

docs/validation/rehearsed.txt, which tests/docs compares, has every record.
"""

import tomllib
from pathlib import Path

import msgspec
import pytest

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import SpecError
from tools.validate.published.cases import PublishedCase
from tools.validate.published.rehearsed import compare_rehearsed_outcomes, read_rehearsed

FOLDER = Path(__file__).parents[3] / "results" / "rehearsed" / "published"
RECORDS = read_rehearsed(FOLDER / "records")


def test_records_hold_what_the_packaged_rows_say(cases: dict[str, PublishedCase]) -> None:
    for record in RECORDS:
        case = cases[record.case]
        assert record.published == {one.kind: one.num_bytes for one in case.measured if "nvidia-smi" not in one.kind}
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


def test_no_published_outcome_is_wrongly_accepted_or_refused() -> None:
    found = compare_rehearsed_outcomes(RECORDS)
    assert [(one.case, one.verdict) for one in found if not one.ran] == [("less_2b_bs24", Verdict.DOES_NOT_FIT)]
    assert [one.case for one in found if one.ran and one.verdict is Verdict.DOES_NOT_FIT] == []
    assert len(found) == len({one.case for one in found}) == 28


def test_a_folder_without_records_and_a_broken_one_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no records of rehearsals"):
        read_rehearsed(tmp_path)
    (tmp_path / "a.json").write_text('{"case": 1}')
    with pytest.raises(SpecError, match="holds a file that is no such record"):
        read_rehearsed(tmp_path)
    with_peaks = next(record for record in RECORDS if record.published)
    (tmp_path / "a.json").write_bytes(to_json(msgspec.structs.replace(with_peaks, peaks={})))
    with pytest.raises(SpecError, match="not all rehearsed ones"):
        read_rehearsed(tmp_path)
