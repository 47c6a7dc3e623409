"""Prints predicted against published throughput: a table, a summary beside one constant MFU, what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fsdp_bench.predict.published_speed import SpeedRow, SpeedSummary

_WIDTH = 40


def format_speed(rows: Sequence[SpeedRow], summary: SpeedSummary) -> str:
    """Return everything as plain text."""
    predicted = [row for row in rows if row.error is not None]
    lines = [
        f"predicted against published throughput: {len(predicted)} rows, from datasheets alone; tokens/s per GPU",
        f"constant MFU: the one of {summary.best_constant_mfu:.1%} that fits all these rows best, chosen afterwards",
        "",
        f"  {'case':<{_WIDTH}}{'':<10}{'published':>10}{'predicted':>10}{'error':>8}{'constant MFU':>14}{'exposed':>9}",
    ]
    lines += [_line(row) for row in predicted]
    lines += ["", *_summary(predicted, summary), "", "taken:"]
    lines += [f"  {fact}: {', '.join(families)}" for fact, families in _assumptions(predicted).items()]
    return "\n".join([*lines, "", "not predicted:", *_reasons(rows)])


def _line(row: SpeedRow) -> str:
    assert row.predicted_tokens_per_second is not None
    line = f"  {row.case:<{_WIDTH}}{'compiled' if row.compiled else 'eager':<10}"
    line += f"{row.published_tokens_per_second:>10,.0f}{row.predicted_tokens_per_second:>10,.0f}"
    return f"{line}{row.error:>+8.1%}{row.constant_mfu_error:>+14.1%}{row.exposed_share:>9.1%}"


def _summary(rows: Sequence[SpeedRow], summary: SpeedSummary) -> list[str]:
    lines = [f"  {'median |error|':<30}{'rows':>6}{'predicted':>12}{'constant MFU':>14}"]
    groups = {"all": list(rows)}
    for family in summary.by_family:
        groups[family] = [row for row in rows if row.family == family]
    groups["eager"] = [row for row in rows if not row.compiled]
    groups["compiled"] = [row for row in rows if row.compiled]
    for name, group in groups.items():
        if group:
            ours = median(abs(row.error or 0.0) for row in group)
            constant = median(abs(row.constant_mfu_error or 0.0) for row in group)
            lines.append(f"  {name:<30}{len(group):>6}{ours:>12.1%}{constant:>14.1%}")
    return lines


def _assumptions(rows: Sequence[SpeedRow]) -> dict[str, list[str]]:
    """Return what was taken for granted, and for which families or cases."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for fact in row.assumptions:
            who = row.case if "of the blocks" in fact else row.family
            if who not in found.setdefault(fact, []):
                found[fact].append(who)
    return found


def _reasons(rows: Sequence[SpeedRow]) -> list[str]:
    grouped: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            grouped.setdefault(row.reason, []).append(row.case)
    return [f"  {reason}: {', '.join(names)}" for reason, names in grouped.items()]
