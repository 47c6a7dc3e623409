"""The errors of predicted speed and memory, which plans print beside them (catalog/prediction_errors.json)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from fsdp_bench.plan.ranges import Errors, HeldOut, PredictionErrors, SpeedErrors
from fsdp_bench.spec.codec import to_builtins
from tools.validate.published.peaks import compare_published
from tools.validate.published.speed import SpeedRow, compare_speed

CENTRAL = 0.95
"""Fraction of the errors that a range holds."""


def errors_of_predictions() -> PredictionErrors:
    """Return the errors of all published runs: of speed the central ones, of memory the extremes by kind."""
    peaks = (("compiled" if row.compiled else "eager", row.family, row.error) for row in compare_published())
    return PredictionErrors(speed=speed_errors(compare_speed()[0]), memory=_errors(peaks))


def speed_errors(rows: Iterable[SpeedRow]) -> SpeedErrors:
    """Return the range of the errors of speed, and how many runs of each publisher the others' range holds."""
    compared = [row for row in rows if row.error is not None]
    families = sorted({row.family for row in compared})
    held_out = {}
    for family in families:
        own = [row.error or 0.0 for row in compared if row.family == family]
        low, high = central_errors(row for row in compared if row.family != family)
        held_out[family] = HeldOut(len(own), sum(low <= error <= high for error in own))
    low, high = central_errors(compared)
    return SpeedErrors(
        num_runs=len(compared),
        families=tuple(families),
        gpus=tuple(sorted({row.gpu for row in compared})),
        lowest=round(low, 4),
        highest=round(high, 4),
        held_out=held_out,
    )


def fraction_inside(errors: SpeedErrors) -> float:
    """Return the fraction of runs inside of a range that they did not make."""
    return sum(one.inside for one in errors.held_out.values()) / errors.num_runs


def central_errors(rows: Iterable[SpeedRow]) -> tuple[float, float]:
    """Return the smallest and the largest of the central errors; each publisher counts as much as any other."""
    by_family: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_family[row.family].append(row.error or 0.0)
    weighted = sorted((error, 1 / len(errors)) for errors in by_family.values() for error in errors)
    total, below, low = float(len(by_family)), 0.0, weighted[0][0]
    for error, weight in weighted:
        below += weight
        if below <= total * (1 - CENTRAL) / 2:
            low = error
        if below >= total * (1 + CENTRAL) / 2:
            return low, error
    return low, weighted[-1][0]


def _errors(rows: Iterable[tuple[str, str, float | None]]) -> dict[str, Errors]:
    by_kind: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for kind, family, error in rows:
        if error is not None:
            by_kind[kind].append((family, error))
    return {
        kind: Errors(
            num_runs=len(found),
            families=tuple(sorted({family for family, _ in found})),
            lowest=round(min(error for _, error in found), 4),
            highest=round(max(error for _, error in found), 4),
        )
        for kind, found in sorted(by_kind.items())
    }


if __name__ == "__main__":
    print(json.dumps(to_builtins(errors_of_predictions()), indent=2))
