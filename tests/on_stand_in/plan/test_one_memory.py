"""The fourth column of docs/validation/memory.md, one setting in four commands: rehearsals of exported scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.one_memory import ROWS, WITHIN_GIB, Answers, Row, predicted, rehearsed, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # models of full size; adapters are recorded first


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_exported_script_takes_what_three_commands_said(row: Row, tmp_path: Path) -> None:
    found = predicted(row, tmp_path)
    both = Answers(found.batch, {**found.peaks, "rehearse": rehearsed(row, tmp_path)})
    assert both.line(row) == table()[ROWS.index(row)]
    assert found.apart_gib == 0
    assert both.apart_gib <= WITHIN_GIB
