"""The charts of time: their data, and that they are drawn."""

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.lookup import server
from fsdp_bench.plan.chart_data import exposed_spans
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.plan.speed import speed
from fsdp_bench.report.charts.description import boxes_apart
from fsdp_bench.report.charts.scaling import node_counts, scaling_curves, scaling_slide
from fsdp_bench.report.charts.slide import figure_of
from fsdp_bench.report.charts.step import step_slide
from fsdp_bench.report.charts.trade_off import (
    TradeOffPoint,
    pareto_frontier,
    right_end,
    trade_off_points,
    trade_off_slide,
)
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Precision, ShardingStrategy, TrainSetup
from fsdp_bench.spec.units import GIB
from tests.conftest import refused, run_command
from tests.report.charts.pictures import assert_is_a_slide, assert_texts_are_inside_and_apart, text_of_quantity

MIXED = Precision("fp32", "bf16", "fp32")


def cluster(nodes: int = 2) -> Hardware:
    return server("p4d.24xlarge", nodes)


points = st.lists(
    st.builds(
        TradeOffPoint,
        memory_bytes=st.integers(1, 20).map(float),
        tokens=st.integers(1, 20).map(float),
        fits=st.sampled_from([True, False, None]),
    ),
    max_size=12,
)


@given(points)
def test_no_setup_that_fits_beats_the_frontier_and_each_on_it_is_one_of_them(given_points: list[TradeOffPoint]) -> None:
    best = pareto_frontier(given_points)
    assert all(point in given_points and point.fits is not False for point in best)
    for point in given_points:
        if point.fits is not False:
            assert any(one.memory_bytes <= point.memory_bytes and one.tokens >= point.tokens for one in best)
    for one in best:
        assert not any(
            other.fits is not False
            and (other.memory_bytes, -other.tokens) != (one.memory_bytes, -one.tokens)
            and other.memory_bytes <= one.memory_bytes
            and other.tokens >= one.tokens
            for other in given_points
        )


def test_the_red_stretches_add_up_to_the_exposed_seconds() -> None:
    setup = TrainSetup(world_size=16, precision=MIXED, sequence_length=512)
    found = speed(SimulatedSteps(loader.model("gpt2").shape(), setup), cluster(), with_spans=True)
    red = sum(end - begin for begin, end in exposed_spans(found.time.spans))
    assert red == pytest.approx(found.time.exposed_communication_seconds)
    assert red > 0


def test_nodes_double_up_to_the_last() -> None:
    assert node_counts(1) == (1,)
    assert node_counts(8) == (1, 2, 4, 8)
    assert node_counts(12) == (1, 2, 4, 8, 12)


def test_a_curve_is_what_predict_says_on_that_many_nodes() -> None:
    model = loader.model("gpt2").shape()
    setups = [
        TrainSetup(strategy=ShardingStrategy.FULL_SHARD, world_size=32, precision=MIXED),
        TrainSetup(strategy=ShardingStrategy.HYBRID_SHARD, world_size=32, shard_size=8, precision=MIXED),
    ]
    full, hybrid = scaling_curves([Question(model, setup, cluster(4)) for setup in setups])
    assert full.nodes == hybrid.nodes == (1, 2, 4)
    assert full.tokens[-1] == speed_of(Question(model, setups[0], cluster(4))).tokens_per_second_per_gpu
    assert hybrid.tokens[0] is None  # one node has one shard group
    assert hybrid.tokens[-1] == speed_of(Question(model, setups[1], cluster(4))).tokens_per_second_per_gpu


def test_a_curve_has_a_band_to_both_ends_of_its_range() -> None:
    questions = [Question(loader.model("gpt2").shape(), TrainSetup(world_size=16, precision=MIXED), cluster(2))]
    (curve,) = scaling_curves(questions)
    figure = figure_of(scaling_slide(questions))
    (axes,) = figure.axes
    (band,) = axes.collections
    ends = sorted({y for _, y in band.get_paths()[0].vertices})
    spans = [(one.tokens_per_second_per_gpu, one.range) for one in curve.speeds if one is not None]
    expected = [tokens * end for tokens, span in spans for end in (span.slowest, span.fastest)]
    assert ends == pytest.approx(sorted(expected))
    assert "bands: 90% of another publisher's runs on one node are expected" in text_of_quantity(figure)
    assert_texts_are_inside_and_apart(figure)


def test_points_of_a_curve_that_do_not_fit_are_white_and_named() -> None:
    """gpt2-xl in fp32 on cards of 8 GiB: 16 bytes of 1.56e9 parameters, over 8 GPUs 3.1 GB, over one 25 GB."""
    small = msgspec.structs.replace(loader.gpu("A100-SXM-40GB"), usable_memory_bytes=8 * GIB)
    nodes = msgspec.structs.replace(cluster(4), gpu=small)
    names = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    setups = [TrainSetup(strategy=name, world_size=32, sequence_length=128) for name in names]
    questions = [Question(loader.model("gpt2-xl").shape(), setup, nodes) for setup in setups]
    full, whole = scaling_curves(questions)
    assert (full.fits[-1], whole.fits) == (True, (False,) * 3)
    figure = figure_of(scaling_slide(questions))
    written = text_of_quantity(figure)
    assert "white marks: predicted not to fit in memory" in written
    (axes,) = figure.axes
    white = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert len(white) == full.fits.count(False) + 3
    assert "does not fit" in written
    assert "1 to 4 x p4d.24xlarge (8 x A100-SXM-40GB each)" in written
    assert_texts_are_inside_and_apart(figure)


def test_every_point_of_the_trade_off_is_inside_the_chart() -> None:
    """An 8B model under NO_SHARD needs twice the GPU's memory and stands at the right end, with an arrow."""
    model, names = loader.model("Llama-3.1-8B").shape(), (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    setups = [TrainSetup(strategy=name, world_size=16, precision=MIXED) for name in names]
    predictions = [answer(Question(model, setup, server("p5.48xlarge", 2))) for setup in setups]
    figure = figure_of(trade_off_slide(predictions))
    axes, _ = figure.axes
    assert axes.get_ylim()[1] > 1.03 * max(point.tokens for point in trade_off_points(predictions))
    assert "2 x p5.48xlarge (16 x H100-SXM)" in text_of_quantity(figure)
    assert_texts_are_inside_and_apart(figure)
    is_cut = axes.get_ylim()[0] > 0
    assert ("the axis does not begin at zero" in axes.get_ylabel()) == is_cut
    far = TradeOffPoint(1000 * GIB, 1.0, False)
    assert right_end([TradeOffPoint(40 * GIB, 2.0, True), far], [80 * GIB]) < 100 * GIB


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_boxes_of_the_trade_off_never_overlap_and_name_every_point(places: list[tuple[float, float]]) -> None:
    boxes = boxes_apart(places)
    assert sorted(number for _, _, numbers in boxes for number in numbers) == list(range(1, len(places) + 1))
    for (x, y, _), (other_x, other_y, _) in itertools.combinations(boxes, 2):
        assert abs(x - other_x) >= 0.02 or abs(y - other_y) >= 0.05


def test_operators_on_the_streams_of_collectives_are_in_the_legend() -> None:
    question = Question(loader.model("gpt2").shape(), TrainSetup(world_size=16, precision=MIXED), cluster(2))
    figure = figure_of(step_slide([question]))
    assert "casts, divisions" in text_of_quantity(figure)
    assert "2 x p4d.24xlarge (16 x A100-SXM-40GB)" in text_of_quantity(figure)
    assert_texts_are_inside_and_apart(figure)


def test_all_three_are_drawn(tmp_path: Path) -> None:
    words = ("--model", "gpt2", "--server", "p4d.24xlarge", "--nodes", 2, "--seq", 512, "--precision", "bf16-mixed")
    names = {"--step-chart": "step.png", "--trade-off": "trade.svg", "--scaling": "scaling.png"}
    asked = [word for option, name in names.items() for word in (option, tmp_path / name)]
    done = run_command("predict", *words, "--strategy", "FULL_SHARD,NO_SHARD", *asked)
    assert done.returncode == 0, done.stderr
    assert_is_a_slide(tmp_path / "step.png")
    assert_is_a_slide(tmp_path / "trade.svg", "FULL_SHARD", "NO_SHARD")
    assert_is_a_slide(tmp_path / "scaling.png")


def test_a_chart_of_unknown_times_is_refused_with_the_reason(tmp_path: Path) -> None:
    alone = ("--model", "gpt2", "--gpu", "A10G", "--world-size", 2)
    message = refused("predict", *alone, "--step-chart", tmp_path / "step.png")
    assert "the step's time is unknown: all_gather (shard)" in message
    one = ("--model", "gpt2", "--server", "p4d.24xlarge")
    message = refused("predict", *one, "--trade-off", tmp_path / "trade.png")
    assert "the time of 1 of 1 setups is known, two are needed" in message
    drawable = (*one, "--strategy", "all", "--trade-off", tmp_path / "trade.png", "--chart", tmp_path / "step.png")
    alone = (*drawable, "--api", "all", "--scaling", tmp_path / "scaling.png")
    assert "too many for one picture" in refused("predict", *alone)
    without = ("--model", "gpt2", "--gpu", "A10G", "--chart", tmp_path / "step.png", "--scaling", tmp_path / "s.png")
    assert "no server is named" in refused("predict", *without)
    assert not list(tmp_path.iterdir())
