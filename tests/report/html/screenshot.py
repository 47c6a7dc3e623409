"""Draws docs/pictures/report.png anew, in a browser: ``python -m tests.report.html.screenshot``."""

import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from fsdp_bench.report.html import write
from tests.report.html.samples import RESULTS
from tests.report.html.test_browser import CHROMIUM

PICTURE = Path(__file__).parents[3] / "docs" / "pictures" / "report.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        html = Path(folder) / "report.html"
        write(RESULTS / "cpu", html)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1160, "height": 1240})
        page.goto(html.as_uri())
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
