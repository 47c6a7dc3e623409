"""Model: a benchmark model's dimensions, or a recorded model. Predictions take either."""

from __future__ import annotations

from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import RecordedModel

Model = ModelShape | RecordedModel
