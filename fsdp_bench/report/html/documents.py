"""Reads the JSON documents of plan, predict and max-size, as far as a page needs them. Nothing in them is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.plan.purchase.document import Bytes, Count, PlanDocument, Positive
from fsdp_bench.spec.codec import from_builtins, read_document
from fsdp_bench.spec.errors import ResultsError, SpecError, shown
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.lora import LoRA

T = TypeVar("T")

Setting = bool | int | float | str | None
"""The value of a field of a setup."""


class PredictedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a predicted setup."""

    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes | None = None
    needed_bytes: Bytes | None = None
    peak_phase: str
    peak_block: int | None = None
    peak_operator: str
    phases: dict[str, Bytes]
    breakdown_bytes: dict[str, Bytes]


class PredictedTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a predicted step."""

    step_seconds: Positive | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    parts_seconds: dict[str, float] | None = None
    tokens_per_second_per_gpu: Positive | None = None
    mfu: float | None = None
    rates: str | None = None
    unknown: tuple[str, ...] = ()


class PredictedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a prediction."""

    name: str = "unknown"
    code: str = "benchmark"
    lora: LoRA | None = None
    num_parameters: Count | None = None


class PredictedServer(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware of a prediction."""

    name: str | None = None
    gpu: str | None = None
    gpu_memory_bytes: Bytes | None = None
    gpu_memory_source: Source | None = None
    num_nodes: Count | None = None
    gpus_per_node: Count | None = None


class PredictionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What ``predict --json`` prints of one setup."""

    source: str
    torch: str | None = None
    kernels: str | None = None
    model: PredictedModel
    setup: dict[str, Setting]
    server: PredictedServer
    impossible: str | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] | None = None
    memory: PredictedMemory | None = None
    time: PredictedTime | None = None
    fits: bool | None = None
    verdict: str | None = None
    headroom_bytes: int | None = None
    required_headroom_bytes: int | None = None
    required_headroom_source: str | None = None


class Limited(msgspec.Struct, frozen=True, kw_only=True):
    """What the next value exceeds."""

    words: str


class LargestDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of ``max-size --json``."""

    setup: dict[str, Setting]
    assumptions: tuple[str, ...] = ()
    impossible: str | None = None
    unknown: str | None = None
    fits_value: int | None = None
    runs_value: int | None = None
    model: str | None = None
    memory: PredictedMemory | None = None
    time: PredictedTime | None = None
    limited_by: Limited | None = None


class MaxSizeDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What ``max-size --json`` prints of one server."""

    source: str
    torch: str | None = None
    dial: str
    fits_means: str = ""
    server: PredictedServer
    cells: tuple[LargestDocument, ...]


Document = PlanDocument | list[PredictionDocument] | list[MaxSizeDocument]

WRITERS = "fsdp-bench plan, predict or max-size with --json"


def read(path: Path) -> Document:
    """Read a document.

    Raises:
        SpecError: if the file cannot be read or is not JSON.
        ResultsError: if it holds something else than what fsdp-bench writes.
    """
    raw = read_document(path, "JSON")
    if isinstance(raw, dict) and "error" in raw:
        raise ResultsError(f"{path}: holds an error, not an answer: {shown(raw['error'])}")
    if isinstance(raw, dict) and {"winner", "pareto"} <= raw.keys():
        return _decoded(raw, PlanDocument, path)
    predictions = raw.get("predictions", [raw]) if isinstance(raw, dict) else []
    if _all_have(predictions, {"setup", "memory", "fits"}):
        return [_decoded(one, PredictionDocument, path) for one in predictions]
    servers = raw.get("servers", [raw]) if isinstance(raw, dict) else []
    if _all_have(servers, {"cells", "dial"}):
        return [_decoded(one, MaxSizeDocument, path) for one in servers]
    raise ResultsError(f"{path}: is no answer that {WRITERS} writes")


def _all_have(values: Any, keys: set[str]) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, dict) and keys <= v.keys() for v in values)


def _decoded(raw: Any, kind: type[T], path: Path) -> T:
    try:
        return from_builtins(raw, kind)
    except (msgspec.ValidationError, SpecError) as error:
        raise ResultsError(f"{path}: is not what {WRITERS} writes: {shown(str(error))}") from None
