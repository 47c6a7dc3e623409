"""The matrix of frameworks as data: each row is whole, its record is of that row, and the page is written from both."""

from pathlib import Path

import pytest

from fsdp_bench.spec.errors import SpecError
from tools.frameworks.matrix import RECORDS, Framework, Row, read_matrix
from tools.frameworks.page import write_page
from tools.frameworks.rehearsal import record_of

MATRIX = read_matrix()
ROWS = [(framework, row) for framework in MATRIX for row in framework.rows]
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


@pytest.mark.parametrize(("framework", "row"), ROWS, ids=lambda one: getattr(one, "name", ""))
def test_a_row_is_recorded_at_each_of_its_releases_or_says_what_is_missing(framework: Framework, row: Row) -> None:
    asked = {one.release for one in framework.of_row(row)}
    assert asked or row.missing
    assert {run.release for run in record_of(framework, row).runs} == asked
    assert all("\n" not in why for why in row.missing.values())


@pytest.mark.parametrize(("framework", "row"), ROWS, ids=lambda one: getattr(one, "name", ""))
def test_a_row_that_ran_took_two_steps_or_more(framework: Framework, row: Row) -> None:
    for run in record_of(framework, row).runs:
        assert run.answer in ("fits", "fits with retries", "does not fit"), run.why
        assert run.num_steps >= 2 or run.answer == "does not fit"


def test_the_page_is_written_from_the_records(tmp_path: Path) -> None:
    copy = tmp_path / "frameworks.md"
    copy.write_text(PAGE.read_text())
    write_page(copy)
    assert copy.read_text() == PAGE.read_text()


def test_no_record_is_of_a_row_that_is_gone() -> None:
    assert {file.stem for file in RECORDS.glob("*.json")} <= {row.name for _, row in ROWS}


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    text = 'framework = "{0}"\nreleases = []\n[[rows]]\nname = "same"\nwhat = "one"\n'
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(text.format(name))
    with pytest.raises(SpecError, match="same is there twice"):
        read_matrix(tmp_path)
