"""The errors of predicted speed by GPU generation, which plans print beside speeds (catalog/speed_errors.json)."""

from __future__ import annotations

from collections import defaultdict

from fsdp_bench.plan.purchase.ranges import SpeedErrors
from fsdp_bench.validate.published.speed import SpeedRow, compare_speed, kind_of


def errors_by_generation() -> dict[str, SpeedErrors]:
    """Return the lowest and highest error of all published runs, by ``A100 eager``, ``H100 compiled``, ..."""
    rows: dict[str, list[SpeedRow]] = defaultdict(list)
    for row in compare_speed()[0]:
        if row.error is not None:
            rows[f"{row.gpu} {kind_of(row)}"].append(row)
    return {
        name: SpeedErrors(
            num_runs=len(found),
            families=tuple(sorted({row.family for row in found})),
            lowest=round(min(row.error or 0.0 for row in found), 4),
            highest=round(max(row.error or 0.0 for row in found), 4),
        )
        for name, found in sorted(rows.items())
    }
