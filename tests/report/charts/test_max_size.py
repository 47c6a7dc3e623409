"""Charts of the largest that fits, predicted and measured: contents, no overlaps, legibility without colours.

Measured ones are from a committed record of a sweep on two cores.
"""

from itertools import pairwise, product
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from msgspec.structs import replace

from fsdp_bench.catalog import loader
from fsdp_bench.plan.search.quantity import size_ladder
from fsdp_bench.report.charts import frontier as frontier_chart
from fsdp_bench.report.charts.colors import PALETTE
from fsdp_bench.report.charts.description import Bar, Bars, Slide
from fsdp_bench.report.charts.frontier import draw_frontier, frontier_slide
from fsdp_bench.report.charts.max_size import (
    CANNOT_RUN,
    MEASURED,
    MOST_BARS,
    NONE_FITS,
    PUBLISHED,
    STYLES,
    UNKNOWN,
    MaxSizeBar,
    arrange,
    size_bars,
)
from fsdp_bench.report.charts.slide import draw, figure_of
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.model import LONGEST_NAME, Family
from fsdp_bench.spec.setup import Checkpointing, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.sweep.results.load import read_frontier_of
from tests.report.charts.pictures import (
    assert_is_a_slide,
    assert_texts_are_inside_and_apart,
    text_of_quantity,
    texts_of,
)
from tests.sweep.frontier.test_cell import SHAPE

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
AXES = ((1e9, "billion parameters"), (1e6, "million parameters"))


def chart_of(
    bars: list[MaxSizeBar], levels: tuple[str, ...] = ("checkpointing",), titles: tuple[str, ...] = ("",)
) -> Slide:
    conditions = ("source: predicted", "setup: 8 ranks", "hardware: " + "a server of many words " * 4)
    charts = size_bars(dict.fromkeys(titles, bars), AXES, levels)
    return Slide("Largest", "somewhere", conditions, charts, ("a note",))


def rows(source: str = "predicted", **fields: int) -> list[MaxSizeBar]:
    return [
        MaxSizeBar(strategy, (mode,), int(1e9 * (9 - place) * (1 + (mode == "full"))), source, **fields)
        for place, strategy in enumerate(STRATEGIES)
        for mode in ("none", "full")
    ]


def solid(made: Figure) -> list[Rectangle]:
    """Return the bars without the dashed outlines, panel by panel."""
    boxes = [patch for axes in made.axes for patch in axes.patches if isinstance(patch, Rectangle)]
    return [box for box in boxes if box.get_facecolor()[3] > 0]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_texts_stay_on_the_chart_and_apart(count: int) -> None:
    bars = [
        MaxSizeBar(strategy, (f"server-{server}.48xlarge", mode), int(1.23e9 * (server + 1)), with_retries=int(4e9))
        for strategy in STRATEGIES
        for server in range(count)
        for mode in (("none", "full") if count < 4 else ("none",))
    ]
    made = figure_of(chart_of(bars, ("server", "checkpointing")))
    assert_texts_are_inside_and_apart(made)
    named = {text.get_text() for text in texts_of(made)}
    legend = {"server-0.48xlarge", "server-1.48xlarge", "checkpointing none", "checkpointing full"}
    assert legend <= named or count != 2


def test_two_rows_of_panels_stay_apart_and_are_named() -> None:
    figure = figure_of(chart_of(rows(), titles=("p4d.24xlarge", "p5.48xlarge")))
    assert_texts_are_inside_and_apart(figure)
    assert "p4d.24xlarge" in text_of_quantity(figure)
    assert len(figure.axes) == 2 * len(STRATEGIES)


def test_every_bar_begins_at_zero_and_carries_its_number() -> None:
    made = figure_of(chart_of(rows()))
    assert {axes.get_yscale() for axes in made.axes} == {"linear"}
    assert {axes.get_ylim()[0] for axes in made.axes} == {0}
    assert len({axes.get_ylim()[1] for axes in made.axes}) == 1
    assert [bar.get_height() for bar in solid(made)] == [bar.value / 1e9 for bar in rows() if bar.value]
    assert {"9B", "18B", "5B", "10B"} <= {text.get_text() for text in texts_of(made)}


def test_measured_bars_are_solid_with_the_prediction_as_a_mark_and_its_error() -> None:
    made = figure_of(chart_of([MaxSizeBar("FULL_SHARD", ("none",), int(100e6), MEASURED, predicted=int(104e6))]))
    (axes,) = made.axes
    assert "100M\n+4.0%" in {text.get_text() for text in axes.texts}
    marks = [line for line in axes.lines if line.get_marker() == "D"]
    assert [line.get_ydata()[0] for line in marks] == [104]
    (bar,) = solid(made)
    assert bar.get_facecolor()[:3] == to_rgb(PALETTE[STYLES[MEASURED][0].color][0])
    assert "measured" in text_of_quantity(made)
    assert_texts_are_inside_and_apart(made)


def test_a_published_bar_looks_like_no_predicted_one() -> None:
    bars = [MaxSizeBar("NO_SHARD", ("published",), int(1e9), PUBLISHED), MaxSizeBar("NO_SHARD", ("ours",), int(1e9))]
    dark, light = (sum(bar.get_facecolor()[:3]) for bar in solid(figure_of(chart_of(bars))))
    assert dark < 1.2 < 2 < light


@pytest.mark.parametrize("source", ["predicted", MEASURED])
def test_neighbours_differ_in_black_and_white(source: str) -> None:
    for one, other in pairwise(solid(figure_of(chart_of(rows(source))))):
        assert one.get_hatch() != other.get_hatch()


def test_a_missing_bar_has_its_reason_once() -> None:
    bars = [
        MaxSizeBar("FULL_SHARD", ("none",), int(1e9)),
        MaxSizeBar("FULL_SHARD", ("full",), None, note=NONE_FITS),
        MaxSizeBar("HYBRID_SHARD", ("none",), None, note=CANNOT_RUN),
        MaxSizeBar("HYBRID_SHARD", ("full",), None, note=CANNOT_RUN),
    ]
    made = figure_of(chart_of(bars))
    written = [text.get_text() for text in texts_of(made)]
    assert written.count(NONE_FITS) == 1
    assert written.count(CANNOT_RUN) == 1  # a strategy that cannot run at all takes one place
    assert_texts_are_inside_and_apart(made)


def test_the_number_stands_on_its_bar_even_under_a_high_outline() -> None:
    (axes,) = figure_of(chart_of([MaxSizeBar("FULL_SHARD", ("none",), int(1e9), with_retries=int(3e9))])).axes
    (number,) = [text for text in axes.texts if text.get_text() == "1B"]
    assert number.xy[1] == 1


def test_the_chart_has_the_size_of_a_slide(tmp_path: Path) -> None:
    for name, words in (("bars.png", ()), ("bars.svg", ("FULL_SHARD", "HYBRID_SHARD"))):
        draw(chart_of(rows()), tmp_path / name)
        assert_is_a_slide(tmp_path / name, *words)


def ladders(precisions: int = 1, modes: int = 2) -> list:
    names = ("fp32", "bf16-mixed", "bf16-true", "fp16-mixed")[:precisions]
    gpu = Hardware.of_gpu(loader.gpu("A10G"))
    return [
        size_ladder(
            Family.LLAMA,
            TrainSetup(strategy=strategy, precision=Precision.parse(name), checkpointing=mode, world_size=8),
            gpu,
        )
        for strategy in ShardingStrategy
        for name in names
        for mode in tuple(Checkpointing)[:modes]
    ]


def test_varying_fields_label_the_bars_and_one_too_many_becomes_rows() -> None:
    assert arrange([("one", ladders())]).levels == ("checkpointing",)
    assert arrange([("one", ladders()), ("other", ladders())]).levels == ("server", "checkpointing")
    split = arrange([("one", ladders(precisions=2)), ("other", ladders(precisions=2))])
    assert (split.rows, split.levels) == ("server", ("checkpointing", "precision"))


SWEEP = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "max-size-quick"


def record() -> FrontierRecord:
    return read_frontier_of(SWEEP)


def cells_of(world: int) -> list[FrontierCell]:
    return [cell for cell in record().cells if cell.setup.world_size == world]


def bars_of(cells: list[FrontierCell]) -> list[tuple[str, Bar]]:
    """Return every bar with the heading above it."""
    (chart,) = frontier_slide(record(), cells).charts
    assert isinstance(chart, Bars)
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
