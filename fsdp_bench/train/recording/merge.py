"""Merges recordings of the same code at several points into one whose sizes are formulas."""

from __future__ import annotations

from typing import Any

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.train.recording.formulas import Formulas
from fsdp_bench.train.recording.size import Size


def merged(recordings: list[Any], formulas: Formulas, where: str = "") -> Any:
    """Return one recording: what is equal at all points, and the number of a formula for each size.

    Raises:
        SpecError: where the recordings differ in more than sizes: the code depends on data or on the sizes.
    """
    first = recordings[0]
    if isinstance(first, Size):
        return formulas.number(recordings)
    if isinstance(first, list | tuple):
        if any(len(other) != len(first) for other in recordings):
            raise SpecError(_differs(where, recordings))
        inner = f"{where} {first[1]}" if len(first) == 6 and first[0] == "c" else where
        return [merged([other[index] for other in recordings], formulas, inner) for index in range(len(first))]
    if isinstance(first, dict):
        if any(other.keys() != first.keys() for other in recordings):
            raise SpecError(_differs(where, recordings))
        return {key: merged([other[key] for other in recordings], formulas, where) for key in first}
    if any(other != first for other in recordings):
        raise SpecError(_differs(where, recordings))
    return first


def _differs(where: str, recordings: list[Any]) -> str:
    shown = " / ".join(str(recording)[:60] for recording in recordings[:2])
    place = where.split()[-1] if where.strip() else "the model"
    return (
        f"{place}: its code runs other operators at other sizes, or ones that depend on data; where it loops over the"
        f" sequence, --fixed-length records it for one length ({shown})"
    )
