"""Defaults of all commands and Python functions: precision, sequence length, GPUs per node.

The micro-batch and all other fields have TrainSetup's defaults.
"""

from __future__ import annotations

from fsdp_bench.spec.recording.model import Model, RecordedModel

DEFAULT_PRECISION = "bf16-mixed"
DEFAULT_SEQUENCE_LENGTH = 4096
USUAL_GPUS_PER_NODE = 8
"""GPUs per node if no server is named. Most servers of the catalogue have 8."""


def default_sequence_length(model: Model | None) -> int:
    """Return DEFAULT_SEQUENCE_LENGTH, or the most tokens of a model that has fewer positions.

    Recorded code may hold only for multiples of some number of tokens.
    """
    positions = model.max_position_embeddings if model is not None else None
    if positions is None:
        return DEFAULT_SEQUENCE_LENGTH
    if isinstance(model, RecordedModel):
        positions -= positions % model.code.multiple
    return min(DEFAULT_SEQUENCE_LENGTH, positions)
