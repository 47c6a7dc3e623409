"""From blocks to HTML. Every text is escaped, and control characters are shown as escapes."""

from __future__ import annotations

import base64
import hashlib
from datetime import date
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fsdp_bench.report.html.blocks import Page
from fsdp_bench.report.html.svg import DRAWING, palette
from fsdp_bench.spec.errors import printable
from fsdp_bench.version import __version__


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
    source, _, _ = _loader().get_source(_environment(), name)
    return source


@cache
def _loader() -> PackageLoader:
    return PackageLoader("fsdp_bench.report.html")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=_loader(),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals |= DRAWING
    return made


def _printable(value: Any) -> Any:
    """Return what an expression gives as it is written: Markup as it is, other text without control characters."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value)
