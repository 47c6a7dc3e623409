"""Prints predicted beside published throughput: a table, a summary beside constant MFUs, what is left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from fsdp_bench.report.validation.left_out import left_out, taken
from fsdp_bench.validate.published.speed import SpeedRow, SpeedSummary, kind_of

_WIDTH = 36


def format_speed(rows: Sequence[SpeedRow], summary: SpeedSummary) -> str:
    """Return everything as plain text."""
    compared = [row for row in rows if row.error is not None]
    constants = ", ".join(f"{mfu:.1%} on {gpu}" for gpu, mfu in summary.best_constant_mfu.items())
    lines = [
        f"throughput: {len(rows)} published, {len(compared)} compared; from datasheets alone; tokens/s per GPU",
        f"constant MFU: what fits the rows of each GPU best, chosen afterwards: {constants}",
        "",
        f"  {'case':<{_WIDTH}}{'':<9}{'published':>10}{'predicted':>10}{'error':>8}{'constant MFU':>14}{'exposed':>9}",
    ]
    lines += [_line(row) for row in compared]
    lines += ["", *_summary(compared, summary), ""]
    lines += taken((row.family, row.assumptions) for row in compared)
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _line(row: SpeedRow) -> str:
    assert row.predicted_tokens_per_second is not None
    line = f"  {row.case:<{_WIDTH}}{kind_of(row):<9}"
    line += f"{row.published_tokens_per_second:>10,.0f}{row.predicted_tokens_per_second:>10,.0f}"
    return f"{line}{row.error:>+8.1%}{row.constant_mfu_error:>+14.1%}{row.exposed_share:>9.1%}"


def _summary(rows: Sequence[SpeedRow], summary: SpeedSummary) -> list[str]:
    """Return the median errors: of all rows, by who published them, by GPU, by eager and compiled code on each GPU."""
    groups: dict[str, list[SpeedRow]] = {"all": list(rows)}
    for family in summary.by_family:
        groups[family] = [row for row in rows if row.family == family]
        on = list(dict.fromkeys(row.gpu for row in groups[family]))
        if len(on) > 1:
            groups |= {f"{family} on {gpu}": [r for r in groups[family] if r.gpu == gpu] for gpu in sorted(on)}
    for gpu in sorted(summary.best_constant_mfu):
        of_gpu = [row for row in rows if row.gpu == gpu]
        groups[gpu] = of_gpu
        for kind in ("eager", "compiled"):
            groups[f"{gpu} {kind}"] = [row for row in of_gpu if kind_of(row) == kind]
    lines = [f"  {'median |error|':<30}{'rows':>6}{'predicted':>12}{'constant MFU':>14}{'too fast':>10}"]
    for name, group in groups.items():
        if group:
            ours, constant = _median(row.error for row in group), _median(row.constant_mfu_error for row in group)
            fast = f"{sum((row.error or 0.0) > 0 for row in group)} of {len(group)}"
            lines.append(f"  {name:<30}{len(group):>6}{ours:>12.1%}{constant:>14.1%}{fast:>10}")
    return lines


def _median(errors: Iterable[float | None]) -> float:
    return median(abs(error or 0.0) for error in errors)
