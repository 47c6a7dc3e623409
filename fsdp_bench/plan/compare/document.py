"""The JSON form of a comparison: bytes and seconds, all differences B less A. Unknown values are null."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from fsdp_bench.plan.compare.comparison import Comparison, Difference
from fsdp_bench.plan.compare.reasons import reasons
from fsdp_bench.plan.compare.side import Side


def document(found: Comparison, answer: str) -> dict[str, Any]:
    """Return the JSON form of a comparison, with its answer in one sentence."""
    return {
        "answer": answer,
        "is_equal": found.is_equal,
        "a": _side(found.a),
        "b": _side(found.b),
        "fields": [asdict(one) for one in found.fields],
        "memory": {
            "peaks": _bytes(found.peaks),
            "categories": None if found.categories is None else _bytes(found.categories),
            "phases": _bytes(found.phases),
        },
        "time": {
            "step": None if found.step is None else _seconds((found.step,))[0],
            "parts": _seconds(found.parts),
            "others": _seconds(found.other_times),
            "tokens_per_second_per_gpu": None if found.tokens is None else _numbers(found.tokens, ""),
        },
        "why": [asdict(one) for one in reasons(found)],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "source": side.source,
        "reserved_source": side.reserved_source,
        "model": side.model,
        "peak_phase": side.peak_phase,
        "peak_operator": side.peak_place,
        "verdict": side.verdict,
        "stopped": side.stopped,
        "collectives": side.collectives,
    }


def _bytes(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    return [{"name": one.name, **_numbers(one, "_bytes")} for one in differences]


def _seconds(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    return [{"name": one.name.removesuffix("_seconds"), **_numbers(one, "_seconds")} for one in differences]


def _numbers(one: Difference, unit: str) -> dict[str, float]:
    return {f"a{unit}": one.a, f"b{unit}": one.b, f"difference{unit}": one.difference}
