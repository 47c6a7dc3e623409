"""The errors of predicted speed and memory, which plans print beside them (catalog/prediction_errors.json)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

from fsdp_bench.plan.purchase.ranges import Errors, PredictionErrors
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.validate.published.peaks import compare_published
from fsdp_bench.validate.published.speed import compare_speed, kind_of


def errors_of_predictions() -> PredictionErrors:
    """Return the lowest and highest error of all published runs: of speed by GPU and kind, of memory by kind."""
    speeds = ((f"{row.gpu} {kind_of(row)}", row.family, row.error) for row in compare_speed()[0])
    peaks = (("compiled" if row.compiled else "eager", row.family, row.error) for row in compare_published())
    return PredictionErrors(speed=_errors(speeds), memory=_errors(peaks))


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
