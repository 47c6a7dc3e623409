"""File names of charts whose parts contain characters that a file name must not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.report.charts import frontier as frontier_chart
from fsdp_bench.report.charts.frontier import draw_frontier
from fsdp_bench.spec.model import LONGEST_NAME
from fsdp_bench.sweep.results.load import read_frontier_of
from tests.sweep.frontier.test_cell import SHAPE

SWEEP = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "max-size-quick"


def test_models_named_as_on_the_hub_have_charts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names differ only in a slash; a third is long."""
    monkeypatch.setattr(frontier_chart, "draw", lambda _chart, path: path.write_bytes(b""))
    record = read_frontier_of(SWEEP)
    assert record is not None
    names = ["org/a", "org-a", "../../a", "x" * LONGEST_NAME]
    cells = tuple(replace(record.cells[0], model=replace(SHAPE, name=name)) for name in names)
    paths = draw_frontier(replace(record, cells=cells), tmp_path)
    assert len(set(paths)) == 4
    assert sorted(paths) == sorted(tmp_path.iterdir())
