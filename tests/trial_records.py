"""Records of trials, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fsdp_bench.spec.record import TrialRecord, read_record

GOLDEN = Path(__file__).parent / "spec" / "golden" / "record-v1.json"


def record_with(**fields: Any) -> TrialRecord:
    """Return the record that every version reads, with other fields."""
    return replace(read_record(GOLDEN.read_bytes(), GOLDEN.name), **fields)
