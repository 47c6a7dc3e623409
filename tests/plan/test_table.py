"""Rows in the order of their columns: what is sorted, what is left out, and which names columns have."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.plan.table import MAX_SIZE_COLUMNS, PREDICTION_COLUMNS, Row, find_column, read_table_options

rows = st.lists(
    st.fixed_dictionaries({
        "fits": st.sampled_from([True, False, None]),
        "step_seconds": st.one_of(st.none(), st.integers(0, 3)),
        "strategy": st.sampled_from(["FULL_SHARD", "NO_SHARD"]),
    })
)  # fmt: skip
KNOWN = ("fits", "step_seconds", "strategy")


def arranged(found: list[Row], **options: Any) -> list[tuple[int, Row]]:
    return read_table_options(KNOWN, **options).arranged(list(enumerate(found)))


@given(rows)
def test_rows_are_sorted_by_the_first_column_then_the_next_and_unknown_ones_are_last(found: list[Row]) -> None:
    for sort, sign in (("strategy,step", 1), ("strategy,-step", -1)):
        sorted_rows = [row for _, row in arranged(found, sort=sort)]
        expected = sorted(
            found, key=lambda row: (row["strategy"], row["step_seconds"] is None, sign * (row["step_seconds"] or 0))
        )
        assert [(r["strategy"], r["step_seconds"]) for r in sorted_rows] == [
            (r["strategy"], r["step_seconds"]) for r in expected
        ]


@given(rows)
def test_rows_that_are_alike_keep_their_order_and_only_what_fits_is_kept(found: list[Row]) -> None:
    assert arranged(found) == list(enumerate(found))
    places = [place for place, row in arranged(found, sort="strategy") if row["strategy"] == "NO_SHARD"]
    assert places == sorted(places)
    assert [place for place, _ in arranged(found, only_fits=True)] == [
        place for place, row in enumerate(found) if row["fits"] is True
    ]


@pytest.mark.parametrize(
    ("word", "column"),
    [
        ("step", "step_seconds"),
        ("step_seconds", "step_seconds"),
        ("Needs", "needed_bytes"),
        ("peak allocated", "peak_allocated_bytes"),
        ("batch", "micro_batch_size"),
        ("micro-batch-size", "micro_batch_size"),
        ("nodes", "num_nodes"),
        ("MFU", "mfu"),
    ],
)
def test_a_column_is_named_as_in_json_as_its_option_or_as_in_the_table(word: str, column: str) -> None:
    assert find_column(word, PREDICTION_COLUMNS, "sort") == column


def test_names_of_columns_are_unique_and_have_their_unit() -> None:
    for known in (PREDICTION_COLUMNS, MAX_SIZE_COLUMNS):
        assert len(set(known)) == len(known)
        assert {find_column(name, known, "sort") for name in known} == set(known)
