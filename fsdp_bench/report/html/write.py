"""write(): an answer or a folder of results, as one HTML file. Nothing in what is read is trusted."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.plan.document import AnswerDocument
from fsdp_bench.plan.max_size import MaxSizeDocument
from fsdp_bench.plan.purchase.document import PlanDocument
from fsdp_bench.report.html.blocks import Page
from fsdp_bench.report.html.max_size import max_size_page
from fsdp_bench.report.html.plan import plan_page
from fsdp_bench.report.html.prediction import prediction_page
from fsdp_bench.report.html.render import html
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.errors import ResultsError, SpecError, shown
from fsdp_bench.spec.files import read_document, write_atomically

T = TypeVar("T")

WRITERS = "fsdp-bench plan, predict, dry-run or max-size with --json"


def write(source: str | Path, file: str | Path, profile: Profile | None = None) -> None:
    """Write a report.

    Args:
        source: a folder of results, or a file with what plan, predict, dry-run or max-size printed with --json.
        file: the HTML file. A file of that name is replaced, whole or not at all.
        profile: a calibration, for predicted times of trials.

    Raises:
        ResultsError: if the source holds nothing that fsdp-bench writes, or the file cannot be written.
        SpecError: if the source cannot be read, or a newer fsdp-bench wrote it.
    """
    source, file = Path(source), Path(file)
    if file.is_dir():  # before anything is read
        raise ResultsError(f"html: {str(file)!r} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ResultsError(f"html: {str(file.parent)!r} is no folder")
    page = page_of(source, profile)
    try:
        write_atomically(file, html(page, date.today()).encode())
    except OSError as error:
        raise ResultsError(f"{file}: cannot be written: {error.strerror}") from None


def page_of(source: Path, profile: Profile | None = None) -> Page:
    """Return the page of a source.

    Raises:
        ResultsError, SpecError: as ``write``.
    """
    if not source.exists():
        raise ResultsError(f"{source}: there is no such file or folder")
    if source.is_dir():
        from fsdp_bench.report.html.sweep import sweep_page

        return sweep_page(source, profile)
    raw: Any = read_document(source, "JSON")
    if isinstance(raw, dict):
        if "error" in raw:
            raise ResultsError(f"{source}: holds an error, not an answer: {shown(raw['error'])}")
        if {"winner", "pareto"} <= raw.keys():
            return plan_page(_read(raw, PlanDocument, source))
        if answers := _several(raw, ("predictions", "dry_runs"), {"setup", "memory", "fits"}):
            return prediction_page([_read(one, AnswerDocument, source) for one in answers])
        if servers := _several(raw, ("servers",), {"cells", "dial"}):
            return max_size_page([_read(one, MaxSizeDocument, source) for one in servers])
    raise ResultsError(f"{source}: is no answer that {WRITERS} writes")


def _several(raw: dict[str, Any], names: tuple[str, ...], keys: set[str]) -> list[Any]:
    """Return the documents under one of the names, or the document alone; none if one of them lacks a key."""
    found = next((raw[name] for name in names if name in raw), [raw])
    is_whole = isinstance(found, list) and all(isinstance(one, dict) and keys <= one.keys() for one in found)
    return found if is_whole else []


def _read(raw: Any, kind: type[T], path: Path) -> T:
    try:
        return from_builtins(raw, kind)
    except (msgspec.ValidationError, SpecError) as error:
        raise ResultsError(f"{path}: is not what {WRITERS} writes: {shown(str(error))}") from None
