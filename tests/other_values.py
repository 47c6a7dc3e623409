"""Another value of each field of a setup than its default, and the setup in which it means something."""

from typing import Any

from fsdp_bench.spec.field import Field

MEANS_SOMETHING_WITH: dict[str, dict[str, Any]] = {
    "checkpointing_policy": {"checkpointing": "selective"},
    "reentrant": {"checkpointing": "full"},
    "sync_every_micro_batch": {"gradient_accumulation_steps": 4},
    "float8": {"compile": True},
    "min_num_params": {"api": "fsdp1", "wrap": "size"},
    "fp32_head": {"wrap": "block-and-ends"},
    "shard_size": {"strategy": "HYBRID_SHARD"},
}
"""Beside ``api = "fsdp2"``."""
_OTHER_VALUES = {
    "checkpointing_policy": "every-second-product",
    "api": "fsdp1",
    "precision": "bf16-true",
    "optimizer": "adamw-fused",
    "loss": "chunked",
    "wrap": "block-and-ends",
    "min_num_params": 50_000,
}
"""Another value of the other fields follows from their type."""


def another_value(one: Field) -> Any:
    if one.name in _OTHER_VALUES:
        return _OTHER_VALUES[one.name]
    return one.words[-1] if one.words else not one.default if one.kind is bool else 2 * (one.default or 1)
