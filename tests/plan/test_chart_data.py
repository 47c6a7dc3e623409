"""A step as data for documents: no peak is lost, exposed time is kept, and what is written is read back."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.chart_data import PIXELS, DrawnStep, drawn_memory, drawn_streams, step_speeds
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.question import Question
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.setup import Precision, ShardingStrategy, TrainSetup


def question(strategy: ShardingStrategy, steps: int = 1) -> Question:
    setup = TrainSetup(
        strategy=strategy,
        precision=Precision.parse("bf16-mixed"),
        world_size=16,
        sequence_length=1024,
        gradient_accumulation_steps=steps,
    )
    return Question(model("1B", 1024), setup, server("p4d.24xlarge", nodes=2))


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_highest_moment_is_the_predicted_peak(strategy: ShardingStrategy, steps: int) -> None:
    asked = question(strategy, steps)
    drawn = drawn_memory(asked.simulated)
    assert drawn.peak_bytes == answer(asked).memory.peak_allocated_bytes
    tops = [sum(moment) for phase in drawn.phases for moment in zip(*phase.live_bytes.values(), strict=True)]
    assert max(tops) == drawn.peak_bytes
    assert sum(phase.width for phase in drawn.phases) == pytest.approx(1)


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


def test_a_document_is_read_back() -> None:
    asked = question(ShardingStrategy.FULL_SHARD)
    (found,) = step_speeds([asked])
    step = DrawnStep(num_micro_batches=1, memory=drawn_memory(asked.simulated), streams=drawn_streams(found))
    assert from_json(to_json(step), DrawnStep) == step
