"""Predicted and published peaks as text: a table, a summary by kind, the terms, and the rows left out with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.spec.units import GIB
from tools.validate.published.peaks import PREDICTED_KINDS, PublishedRow
from tools.validate.text.left_out import left_out, taken, wrapped

WITHIN = 0.05
"""The largest error of allocated and active memory that counts as near."""

HEADERS = ("case", "kind", "published", "predicted", "error", "with\nterms", "their\nerror")
DROPPABLE = ("with\nterms", "their\nerror")


def format_published(rows: Sequence[PublishedRow]) -> str:
    """Return the comparison as plain text.

    The column ``with terms`` is the prediction plus known terms of the framework's code: see published_terms.py.
    """
    predicted = [row for row in rows if row.predicted_bytes is not None]
    published = sum(row.kind is not None for row in rows)
    lines = [
        f"peaks of memory: {published} published, {len(predicted)} compared; GiB",
        "with terms: the prediction and what the framework's own code is known to keep beside it",
        "",
        *table_lines(table_columns(HEADERS, map(_cells, predicted), HEADERS[2:], DROPPABLE), indent=2),
    ]
    lines += ["", *(line for kind in PREDICTED_KINDS for line in _summary(kind, predicted))]
    lines += ["", *_by_publisher(predicted)]
    lines += ["", "what was predicted, and the terms that the prediction does not have:"]
    for case in dict.fromkeys(row.case for row in predicted):
        lines += _details([row for row in predicted if row.case == case])
    lines += ["", "where these terms stand:", *_sources(predicted)]
    lines += ["", *taken((row.family, row.assumptions) for row in predicted)]
    return "\n".join([*lines, "", *left_out((row.case, row.reason) for row in rows)])


def _cells(row: PublishedRow) -> list[str]:
    has_terms = row.with_terms_bytes is not None
    return [
        row.case,
        str(row.kind),
        _gib(row.measured_bytes),
        _gib(row.predicted_bytes),
        _percent(row.error),
        _gib(row.with_terms_bytes) if has_terms else "",
        _percent(row.error_with_terms) if has_terms else "",
    ]


def _details(rows: Sequence[PublishedRow]) -> list[str]:
    row = rows[0]
    lines = wrapped(f"{row.case}: {row.setup}", 2)
    lines += wrapped(f"source: {row.source}; predicted peak in {row.peak_at}", 6)
    for term in dict.fromkeys(term for peak in rows for term in peak.terms):
        size = "size unknown" if term.num_bytes is None else f"{term.num_bytes / GIB:+.3f} GiB"
        where = f" for {term.only} alone" if term.only else ""
        lines += wrapped(f"term {size}{where}: {term.name} ({term.formula})", 6)
    return lines


def _sources(rows: Sequence[PublishedRow]) -> list[str]:
    terms = dict.fromkeys((term.name, term.source) for row in rows for term in row.terms)
    return [line for name, source in terms for line in wrapped(f"{name}: {source}", 2)]


def _summary(kind: str, predicted: Sequence[PublishedRow]) -> list[str]:
    eager, compiled = (
        [row for row in predicted if row.kind == kind and row.compiled is flag] for flag in (False, True)
    )
    return [
        _errors(f"{kind}, eager", [row.error for row in eager]),
        _errors(f"{kind}, eager, with terms", [row.error_with_terms for row in eager]),
        _errors(f"{kind}, compiled", [row.error for row in compiled]),
    ]


def _by_publisher(predicted: Sequence[PublishedRow]) -> list[str]:
    """Return the errors of each publisher on each GPU, of all kinds of peaks together."""
    groups: dict[str, list[float | None]] = {}
    for row in predicted:
        groups.setdefault(f"{row.family} on {row.gpu}", []).append(row.error)
    return [_errors(name, errors) for name, errors in groups.items()]


def _errors(name: str, found: Sequence[float | None]) -> str:
    errors = [error for error in found if error is not None]
    if not errors:
        return f"  {name:<34}no peak"
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    within = sum(size <= WITHIN for size in sizes)
    return (
        f"  {name:<34}{len(errors)} peaks, median |error| {median(sizes):.1%}, worst {worst:+.1%},"
        f" {within} within {WITHIN:.0%}"
    )


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / GIB:.2f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"
