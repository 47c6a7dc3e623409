"""The site of README.md and docs/, made by Sphinx: ``make docs`` writes it to site/, with a search.

It is built and read without a network. Links that lead nowhere are warnings, which ``make docs`` turns into errors.
"""

from __future__ import annotations

import shutil
from typing import Any

project = "fsdp-bench"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "docs/**.md"]
html_theme = "furo"
html_title = "fsdp-bench"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # the outputs of commands are no language

CONTENTS = {
    "README": "questions guide frameworks reference/settings reference/adapters reference/compile reference/code"
    " reference/rehearsals reference/words validation catalog sweeps results clusters python troubleshooting"
    " architecture recordings",
    "docs/guide": "guide/predict guide/max-size guide/plan guide/rehearse guide/check guide/compare guide/dry-run"
    " guide/sweep guide/report guide/machine guide/catalogue guide/models guide/export",
    "docs/validation": "validation/measured validation/memory validation/recorded validation/allocator"
    " validation/published validation/rehearsed validation/time",
}
"""The pages below each page, in the order of the site's menu."""


def _with_contents(app: Any, name: str, source: list[str]) -> None:
    """Add the menu to a page, which does not show it itself."""
    if pages := CONTENTS.get(name):
        below = "\n".join(f"/docs/{page}" for page in pages.split())
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{below}\n```\n"


def _with_index(app: Any, error: Exception | None) -> None:
    if error is None:
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _with_contents)
    app.connect("build-finished", _with_index)
