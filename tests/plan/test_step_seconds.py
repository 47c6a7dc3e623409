"""The step time alone, which plans compare, is the step time of a whole prediction."""

from __future__ import annotations

import pytest

from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.speed import speed, step_seconds
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.setup import TrainSetup


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_step_seconds_are_those_of_the_whole_prediction(api: str, alone: bool) -> None:
    setup = TrainSetup(api=api, world_size=8, sequence_length=2048, precision="bf16-mixed")
    cluster, steps = server("p5.48xlarge"), SimulatedSteps(model("3B", 2048), setup)
    whole = speed(steps, cluster, without_communication=alone).time.step_seconds
    assert whole is not None
    assert step_seconds(steps, cluster, alone) == whole
