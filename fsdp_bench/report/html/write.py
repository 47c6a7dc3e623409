"""write(): an answer or a folder of results, as one HTML file. Nothing in what is read is trusted.

Every text is escaped, and control characters are shown as escapes. Charts have their places in percent, so that they
are as wide as the screen and their letters keep their size. Lines and areas are SVG paths in a square of 1000 x 1000
that is stretched over the chart; words are HTML over it.
"""

import base64
import hashlib
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fsdp_bench.plan.document import AnswerDocument
from fsdp_bench.plan.max_size import MaxSizeDocument
from fsdp_bench.plan.purchase.document import PlanDocument
from fsdp_bench.report.charts.axis import Axis
from fsdp_bench.report.charts.colors import PALETTE, Style
from fsdp_bench.report.charts.description import Area, Line, Plot
from fsdp_bench.report.html.blocks import Page
from fsdp_bench.report.html.plan import plan_page
from fsdp_bench.report.html.prediction import max_size_page, prediction_page
from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.errors import ResultsError, SpecError, printable, shown
from fsdp_bench.spec.files import read_document, write_atomically
from fsdp_bench.version import __version__

_TEMPLATES = Path(__file__).parent / "templates"
_NARROWEST = 0.4
"""Least width of an interval, of 1000."""
_DOT = 2.0
"""Longest dash of a dotted line."""
SIGNS = {"v": "\u25bc", "D": "\u25c6"}
"""Signs of points as letters."""


def html(page: Page, today: date) -> str:
    """Return a page as one HTML document, which needs nothing else."""
    script, style = _asset("script.js"), palette() + _asset("style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template("page.html").render(
        page=page,
        script=Markup(script),
        style=Markup(style),
        script_hash=digest,
        version=__version__,
        today=today.isoformat(),
    )  # fmt: skip


def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals |= {"looks": looks, "line_path": line_path, "area_path": area_path, "boxes": boxes, "signs": SIGNS}
    made.globals["kind_of"] = lambda block: type(block).__name__
    return made


def _printable(value: Any) -> Any:
    """Return what an expression gives as it is written: Markup as it is, other text without control characters."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


def palette() -> str:
    """Return the style sheet of the colours, by the reader's preference; printed pages are light."""
    light, dark = ("".join(f"--c-{name}:{colors[place]};" for name, colors in PALETTE.items()) for place in (0, 1))
    classes = "".join(f".c-{name}{{--c:var(--c-{name})}}" for name in PALETTE)
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{classes}\n"


def looks(style: Style) -> str:
    """Return the classes of a mark."""
    dashes = "" if not style.dash else " dashed" if style.dash[0] > _DOT else " dotted"
    return f"c-{style.color}{dashes}"


def line_path(line: Line, plot: Plot) -> str:
    """Return a line of a plot as SVG path data."""
    return _path(line.x, line.y, plot, line.is_step)


def area_path(area: Area, plot: Plot) -> str:
    """Return an area of a plot as SVG path data."""
    back = _path(area.x[::-1], area.low[::-1], plot, area.is_step, is_back=True)
    return f"{_path(area.x, area.high, plot, area.is_step)}L{back[1:]}Z"


def _path(x: Sequence[float], y: Sequence[float], plot: Plot, is_step: bool, is_back: bool = False) -> str:
    places = [(10 * plot.x.at(left), 1000 - 10 * plot.y.at(high)) for left, high in zip(x, y, strict=True)]
    if not places:
        return ""
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for left, low in places[1:]:
        if not is_step:
            path += f"L{left:.1f} {low:.1f}"
        else:  # a value holds until the next place, also on the way back
            path += f"V{low:.1f}H{left:.1f}" if is_back else f"H{left:.1f}V{low:.1f}"
    return path


def boxes(intervals: Sequence[tuple[float, float]], axis: Axis) -> str:
    """Return intervals of a lane as SVG path data."""
    found = []
    for begin, end in intervals:
        left, right = 10 * axis.at(begin), 10 * axis.at(end)
        found.append(f"M{left:.2f} 0H{max(right, left + _NARROWEST):.2f}V1000H{left:.2f}Z")
    return "".join(found)


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
    """Return the page of a source. Raises ResultsError, SpecError as ``write``."""
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
