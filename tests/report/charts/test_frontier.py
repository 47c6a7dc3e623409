"""The charts of a frontier sweep, from a committed record of a sweep on two cores."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.report.charts import frontier as frontier_chart
from fsdp_bench.report.charts.description import Bar
from fsdp_bench.report.charts.frontier import draw_frontier, frontier_slide
from fsdp_bench.report.charts.max_size import MEASURED, MOST_BARS, NONE_FITS, UNKNOWN
from fsdp_bench.report.charts.slide import figure_of
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord
from fsdp_bench.spec.model import LONGEST_NAME
from fsdp_bench.spec.setup import Checkpointing, Precision
from fsdp_bench.sweep.results.load import read_frontier_of
from tests.report.charts.pictures import assert_texts_are_inside_and_apart
from tests.sweep.frontier.test_cell import SHAPE

SWEEP = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "max-size-quick"


def record() -> FrontierRecord:
    return read_frontier_of(SWEEP)


def cells_of(world: int) -> list[FrontierCell]:
    return [cell for cell in record().cells if cell.setup.world_size == world]


def bars_of(cells: list[FrontierCell]) -> list[tuple[str, Bar]]:
    """Return every bar with the heading above it."""
    (chart,) = frontier_slide(record(), cells).charts
    assert chart.kind == "bars"
    return [(group.title, bar) for group in chart.groups for bar in group.bars]


def test_every_bar_is_what_was_measured_and_its_mark_what_was_predicted() -> None:
    cells = cells_of(2)
    bars = bars_of(cells)
    assert len(bars) == len(cells) == 30
    expected = [(cell.setup.strategy.value, cell.measured.fits, cell.predicted.fits) for cell in cells]
    assert sorted((group, bar.total, bar.mark) for group, bar in bars) == sorted(expected)
    assert {piece.name for _, bar in bars for piece in bar.pieces} == {MEASURED}
    assert len({(group, bar.labels) for group, bar in bars}) == 30


@pytest.mark.parametrize(("elevenths", "text"), [(11, "+10.0%"), (10, "0%")])
def test_an_error_in_per_cent_stands_over_a_bar(elevenths: int, text: str) -> None:
    cell = cells_of(2)[0]
    fits = cell.measured.fits * elevenths // 10
    other = replace(cell, predicted=replace(cell.predicted, fits=fits), steps_apart=10 - elevenths)
    (axes,) = figure_of(frontier_slide(record(), [other])).axes
    assert [one.get_text().split("\n")[-1] for one in axes.texts if one.get_text().endswith("%")] == [text]


def test_a_search_without_result_has_a_word_instead_of_a_bar_and_its_reason_below() -> None:
    cell = cells_of(2)[0]
    crashed = replace(cell, status="unknown", reason="llama-12M crashed: a reason", measured=None, steps_apart=None)
    ((_, bar),) = bars_of([crashed])
    assert (bar.pieces, bar.words) == ((), (UNKNOWN,))
    assert frontier_slide(record(), [crashed]).notes == ("unknown: llama-12M crashed: a reason",)
    ((_, bar),) = bars_of([replace(cell, measured=replace(cell.measured, fits=0, runs=0))])
    assert (bar.pieces, bar.words) == ((), (NONE_FITS,))


def test_conditions_are_printed() -> None:
    words = " ".join(frontier_slide(record(), cells_of(2)).conditions)
    for word in ("256.0 MiB", "gloo", "vocabulary 4096", "2 ranks", "adamw-foreach", "30 of 30 cells"):
        assert word in words


@pytest.mark.parametrize("ranks", [2, 4])
def test_words_above_marks_touch_nothing(ranks: int) -> None:
    figure = figure_of(frontier_slide(record(), cells_of(ranks)))
    assert_texts_are_inside_and_apart(figure)
    for axes in figure.axes:
        highest = max(text.get_window_extent().y1 for text in axes.texts)
        assert highest + 4 < axes.title.get_window_extent().y0  # pixels


def test_more_cells_than_a_chart_shows_are_split_by_api(tmp_path: Path) -> None:
    precisions = map(Precision.parse, ("fp32", "bf16-mixed", "bf16-true", "fp16-mixed"))
    many = [
        replace(cell, setup=replace(cell.setup, checkpointing=checkpointing, precision=precision))
        for checkpointing, precision, cell in product(Checkpointing, precisions, cells_of(4))
    ]
    unique = list({(str(cell.setup), cell.setup.api): cell for cell in many}.values())
    assert len(unique) > MOST_BARS
    names = [path.name for path in draw_frontier(replace(record(), cells=tuple(unique)), tmp_path)]
    assert names == ["max-size-fsdp1.png", "max-size-fsdp2.png"]


def test_models_named_as_on_the_hub_have_charts_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names differ only in a slash; a third is long."""
    monkeypatch.setattr(frontier_chart, "draw", lambda _chart, path: path.write_bytes(b""))
    names = ["org/a", "org-a", "../../a", "x" * LONGEST_NAME]
    cells = tuple(replace(record().cells[0], model=replace(SHAPE, name=name)) for name in names)
    paths = draw_frontier(replace(record(), cells=cells), tmp_path)
    assert len(set(paths)) == 4
    assert sorted(paths) == sorted(tmp_path.iterdir())
