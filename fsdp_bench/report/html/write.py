"""write(): a plan, a prediction or a folder of results, as one HTML file."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from fsdp_bench.plan.purchase.document import PlanDocument
from fsdp_bench.report.html.blocks import Page
from fsdp_bench.report.html.documents import PredictionDocument, read
from fsdp_bench.report.html.predicted.max_size import max_size_page
from fsdp_bench.report.html.predicted.plan import plan_page
from fsdp_bench.report.html.predicted.prediction import prediction_page
from fsdp_bench.report.html.render import html
from fsdp_bench.spec.codec import write_atomically
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.profile import Profile


def write(source: str | Path, file: str | Path, profile: Profile | None = None) -> None:
    """Write a report.

    Args:
        source: a folder of results, or a file with what plan, predict or max-size printed with --json.
        file: the HTML file. A file of that name is replaced, whole or not at all.
        profile: a calibration, for predicted times of trials.

    Raises:
        ResultsError: if the source holds nothing that fsdp-bench writes, or the file cannot be written.
        SpecError: if the source cannot be read, or a newer fsdp-bench wrote it.
    """
    source, file = Path(source), Path(file)
    check_file(file)
    page = page_of(source, profile)
    try:
        write_atomically(file, html(page, date.today()).encode())
    except OSError as error:
        raise ResultsError(f"{file}: cannot be written: {error.strerror}") from None


def check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is read.

    Raises:
        ResultsError: if it is a folder, or is in none.
    """
    if file.is_dir():
        raise ResultsError(f"html: {str(file)!r} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise ResultsError(f"html: {str(file.parent)!r} is no folder")


def page_of(source: Path, profile: Profile | None = None) -> Page:
    """Return the page of a source.

    Raises:
        ResultsError, SpecError: as ``write``.
    """
    if not source.exists():
        raise ResultsError(f"{source}: there is no such file or folder")
    if source.is_dir():
        from fsdp_bench.report.html.measured.sweep import sweep_page

        return sweep_page(source, profile)
    found = read(source)
    if isinstance(found, PlanDocument):
        return plan_page(found)
    predictions = [one for one in found if isinstance(one, PredictionDocument)]
    if predictions:
        return prediction_page(predictions)
    return max_size_page([one for one in found if not isinstance(one, PredictionDocument)])
