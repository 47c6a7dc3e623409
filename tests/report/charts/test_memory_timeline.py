"""A step as data for charts and documents, in which no peak is lost; and the chart of memory over one step."""

from types import SimpleNamespace

import msgspec
import pytest
from matplotlib.figure import Figure

from fsdp_bench.catalog import loader
from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.chart_data import CATEGORIES, PIXELS, DrawnMemory, drawn_memory, drawn_streams, phases, step_speeds
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.report.charts import memory_timeline as timeline_chart
from fsdp_bench.report.charts.slide import figure_of
from fsdp_bench.simulate.events import Category, Event, Kind
from fsdp_bench.simulate.simulation import BETWEEN_STEPS
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup
from fsdp_bench.spec.units import GIB, MIB
from tests.report.charts.pictures import assert_texts_are_inside_and_apart, text_of_quantity
from tests.shapes import shape


def on_two_nodes(strategy: ShardingStrategy, steps: int = 1, api: Api = Api.FSDP1) -> Question:
    setup = TrainSetup(
        api=api,
        strategy=strategy,
        precision=Precision.parse("bf16-mixed"),
        world_size=16,
        sequence_length=1024,
        gradient_accumulation_steps=steps,
    )
    return Question(model("1B", 1024), setup, server("p4d.24xlarge", nodes=2))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize(("api", "steps"), [(Api.FSDP1, 1), (Api.FSDP2, 1), (Api.FSDP1, 2)])
def test_the_highest_moment_is_the_predicted_peak(strategy: ShardingStrategy, api: Api, steps: int) -> None:
    """The chart simulates every block; the prediction simulates three and repeats one."""
    asked = on_two_nodes(strategy, steps, api)
    drawn = drawn_memory(asked.simulated)
    assert drawn.peak_bytes == answer(asked).memory.peak_allocated_bytes
    tops = [sum(moment) for phase in drawn.phases for moment in zip(*phase.live_bytes.values(), strict=True)]
    assert max(tops) == drawn.peak_bytes
    names = [phase.name for phase in drawn.phases if not phase.name.startswith("first ")]
    assert names == [*["forward", "loss", "backward"] * steps, "optimizer"]
    widths = [phase.width for phase in drawn.phases]
    assert sum(widths) == pytest.approx(1)
    assert min(widths) > 0.05 / 1.4  # wide enough for its name


def test_spans_and_exposed_time_are_kept_to_a_pixel() -> None:
    asked = on_two_nodes(ShardingStrategy.FULL_SHARD)
    time = step_speeds([asked])[0].time
    drawn = drawn_streams(time, asked.model.num_hidden_layers)
    assert drawn.step_seconds == time.step_seconds
    shown = sum(end - begin for begin, end in drawn.whole.exposed)
    pixel = time.step_seconds / PIXELS
    assert shown == pytest.approx(time.exposed_communication_seconds, abs=pixel * (len(drawn.whole.exposed) + 1))
    for view in (drawn.whole, drawn.middle_of_backward):
        for row in view.rows:
            edges = [edge for span in row.spans for edge in span]
            assert edges == sorted(edges)
            assert view.begin - 1e-9 <= edges[0] <= edges[-1] <= view.end + 1e-9


TINY = shape(
    **{"name": "tiny", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024},
    max_position_embeddings=1024,
)
H100 = Hardware.of_gpu(loader.BUILT_IN.gpu("h100-sxm"))


def figure_of_timeline(answers: list[Prediction], refused: list[Question]) -> Figure:
    return figure_of(timeline_chart.timeline_slide(answers, refused))


def question(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **fields: object) -> Question:
    return Question(TINY, TrainSetup(strategy=strategy, world_size=8, **fields), H100)


def mark(phase: str, block: int = -1) -> Event:
    return Event(Kind.MARK, block, label=phase)


def allocate(number: int, num_bytes: int, category: Category) -> Event:
    return Event(Kind.ALLOCATE, number, num_bytes, category, label=f"op{number}")


def free(number: int, num_bytes: int, category: Category) -> Event:
    return Event(Kind.FREE, number, num_bytes, category)


def drawn_by_hand(events: list[Event], **more: int) -> DrawnMemory:
    simulated = SimpleNamespace(step=lambda *_, **__: SimpleNamespace(events=events))
    return drawn_memory(simulated, 0, **more)  # type: ignore[arg-type]


STEP = [
    mark("load"),
    allocate(1, 100, Category.PARAMETERS),
    mark(BETWEEN_STEPS),
    allocate(2, 200, Category.OPTIMIZER_STATE),
    mark("forward"),
    mark("forward", 0),
    allocate(3, 10, Category.ACTIVATIONS),
    mark("loss"),
    allocate(4, 5, Category.LOGITS),
    mark("backward", 0),
    free(4, 5, Category.LOGITS),
    free(3, 10, Category.ACTIVATIONS),
    mark("optimizer"),
    mark(BETWEEN_STEPS),
    free(2, 200, Category.OPTIMIZER_STATE),
]


def test_a_step_is_its_phases_and_begins_with_what_lies_between_steps() -> None:
    found = phases(STEP)
    assert [name for name, _ in found] == ["forward", "loss", "backward", "optimizer"]
    assert [[moment.total for moment in moments] for _, moments in found] == [
        [300, 310],  # parameters and states were there before
        [310, 315],
        [315, 310, 300],
        [300],
    ]
    forward = found[0][1][1]
    assert dict(zip(CATEGORIES, forward.live, strict=True)) == {
        **dict.fromkeys(CATEGORIES, 0),
        Category.PARAMETERS: 100,
        Category.OPTIMIZER_STATE: 200,
        Category.ACTIVATIONS: 10,
    }
    assert (forward.block, forward.operator) == (0, "op3")


def test_thinning_keeps_a_peak_of_one_event() -> None:
    flat = [event for number in range(10, 5000) for event in (
        allocate(number, 1, Category.TEMPORARY), free(number, 1, Category.TEMPORARY))]  # fmt: skip
    spike = [allocate(9, 1000, Category.LOGITS), free(9, 1000, Category.LOGITS)]
    events = [mark("forward"), *flat[:4444], *spike, *flat[4444:], mark("optimizer"), *flat[:2]]
    assert sum(len(moments) for _, moments in phases(events)) > 9000
    found = drawn_by_hand(events, most=100)
    assert (found.peak_bytes, found.peak_phase, found.peak_operator) == (1000, "forward", "op9")
    assert max(map(len, found.phases[0].live_bytes.values())) <= 100
    assert found.phases[0].peak_bytes == 1000


def test_several_setups_share_a_scale_and_say_what_could_not_run() -> None:
    answers = [answer(question(strategy)) for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)]
    refused = Question(TINY, TrainSetup(strategy=ShardingStrategy.HYBRID_SHARD, world_size=2), H100)
    figure = figure_of_timeline(answers, [refused])
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    titles = [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes]
    assert titles == ["FULL_SHARD: fits", "NO_SHARD: fits"]
    assert "impossible: HYBRID_SHARD: " in text_of_quantity(figure)


def test_the_cards_limit_is_drawn_where_it_is() -> None:
    """tiny has 4 blocks of 655,872 parameters and 524,544 others: 16 bytes each in fp32 is 48 MiB under NO_SHARD."""
    small = Hardware.of_gpu(msgspec.structs.replace(H100.gpu, usable_memory_bytes=128 * 1024**2))
    asked = Question(TINY, TrainSetup(strategy=ShardingStrategy.NO_SHARD, world_size=8), small)
    (axes,) = figure_of_timeline([answer(asked)], []).axes
    assert any(list(line.get_ydata()) == [128.0, 128.0] for line in axes.lines)  # MiB
    (axes,) = figure_of_timeline([answer(question())], []).axes
    assert not any(list(line.get_ydata())[:1] == [80 * 1024.0] for line in axes.lines)
    assert "H100-SXM: 79.2 GiB usable, far above" in legend_of(figure_of_timeline([answer(question())], []))
    assert axes.get_ylim()[1] < 80 * GIB


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for part in figure.subfigs for legend in part.legends for text in legend.get_texts()]


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_words_stand_beside_the_panels_and_apart(count: int) -> None:
    apis = [(strategy, api) for strategy in ShardingStrategy if not strategy.is_hybrid for api in Api][:count]
    figure = figure_of_timeline([answer(question(strategy, api=api)) for strategy, api in apis], [])
    assert_texts_are_inside_and_apart(figure)
    for axes in figure.axes:
        over = axes.get_title(loc="left").split("\n")[-1]
        assert over.startswith("\u25bc peak ")
        assert "; reserved " in over
    assert "peak reserved" in legend_of(figure)


def test_a_panel_says_why_it_does_not_fit_where_its_lines_do_not_show_it() -> None:
    """The most memory that is too little without retries, found by steps of 2 MiB, the allocator's own."""
    strategies = (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD)
    needed = answer(question(ShardingStrategy.NO_SHARD)).needed_bytes
    for usable in range(needed - 2 * MIB, needed // 2, -2 * MIB):
        card = Hardware.of_gpu(msgspec.structs.replace(H100.gpu, usable_memory_bytes=usable))
        asked = [
            Question(TINY, TrainSetup(strategy=strategy, world_size=8), card, headroom_bytes=0)
            for strategy in strategies
        ]
        reading = answer(asked[0]).allocator
        if reading.num_alloc_retries and reading.out_of_memory is None:
            break
    axes, _ = figure_of_timeline([answer(one) for one in asked], []).axes
    title = axes.get_title(loc="left")
    assert title.startswith("NO_SHARD: runs with retries\n")
    assert "allocation retr" in title


def test_conditions_and_every_category_that_is_there_are_printed_on_the_chart() -> None:
    printed = text_of_quantity(figure_of_timeline([answer(question())], []))
    for words in ("predicted, not measured", "FULL_SHARD under fsdp1", "8 ranks", "fp32", "batch 1 x 1024 tokens",
                  "adamw-foreach", "torch 2.13", "not seconds", "parameters", "optimizer state", "activations",
                  "logits"):  # fmt: skip
        assert words in printed


def test_the_first_step_is_drawn_only_if_it_has_the_peak() -> None:
    """FSDP1 allocates every unit once before its first forward; here in events by hand, at first below the step."""

    def shown(first: int) -> list[str]:
        events = [mark("load"), mark(BETWEEN_STEPS)]
        for name, size in (("forward", first), (BETWEEN_STEPS, 1), ("forward", 10), ("backward", 20)):
            events.append(mark(name))
            events += [Event(Kind.ALLOCATE, len(events), size), Event(Kind.FREE, len(events), size)]
        return [phase.name for phase in drawn_by_hand(events).phases]

    assert shown(5) == ["forward", "backward"]
    assert shown(30) == ["first forward", "forward", "backward"]
