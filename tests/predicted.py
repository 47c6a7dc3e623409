"""Predictions of one setup, for tests that ask for nothing else of it."""

from __future__ import annotations

from typing import Any

from fsdp_bench.plan.estimate import MemoryPrediction, predict_memory
from fsdp_bench.plan.prediction import Prediction, answer
from fsdp_bench.plan.question import Question
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import TrainSetup


def memory_of(model: Model, setup: TrainSetup, kernels: Kernels = CUDA, rank: int | None = None) -> MemoryPrediction:
    """Return the predicted memory of ``rank``, by default of the rank with the highest peak."""
    return predict_memory(SimulatedSteps(model, setup, kernels), rank)


def estimate_of(model: Model, setup: TrainSetup, hardware: Hardware | None = None, **given: Any) -> Prediction:
    return answer(Question(model, setup, hardware, **given))
