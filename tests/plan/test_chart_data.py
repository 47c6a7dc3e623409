"""A step as data for documents: no peak is lost, exposed time is kept, and what is written is read back."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.chart_data import PIXELS, drawn_memory, drawn_streams, step_speeds
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup


def question(strategy: ShardingStrategy, steps: int = 1, api: Api = Api.FSDP1) -> Question:
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
    asked = question(strategy, steps, api)
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
    (found,) = step_speeds([question(ShardingStrategy.FULL_SHARD)])
    drawn, time = drawn_streams(found), found.time
    assert drawn.step_seconds == time.step_seconds
    shown = sum(end - begin for begin, end in drawn.whole.exposed)
    pixel = time.step_seconds / PIXELS
    assert shown == pytest.approx(time.exposed_communication_seconds, abs=pixel * (len(drawn.whole.exposed) + 1))
    for view in (drawn.whole, drawn.middle_of_backward):
        for row in view.rows:
            edges = [edge for span in row.spans for edge in span]
            assert edges == sorted(edges)
            assert view.begin - 1e-9 <= edges[0] <= edges[-1] <= view.end + 1e-9
