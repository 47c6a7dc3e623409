"""Reports in a browser: Debian's chromium, without network, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_bench.report.html import write
from fsdp_bench.report.html.rehearsal import rehearsal_page
from fsdp_bench.report.html.write import html
from fsdp_bench.spec.calibration_profile import read_profile
from tests.report.html.samples import IMAGE, RESULTS, SCRIPT, STYLE, accumulating_plan, hostile_sweep, plan_file
from tests.report.html.test_rehearsal_page import hostile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
PHONE, DESK, A4 = (375, 700), (1280, 800), (703, 1000)
"""Widths and heights in CSS pixels; A4 is upright, without the margins of the print style sheet."""
A4_SIDEWAYS = (1016, 650)


def _slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow)


@dataclass
class Opened:
    """A page in the browser, and what it did."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""

    def ask(self, script: str) -> Any:
        """Return what an expression gives in the page."""
        return self.page.evaluate(script)


Show = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def show(browser: Browser, reports: dict[str, Path]) -> Iterator[Show]:
    """Return a function that opens a report, or a file, in a window of a size, without network."""
    contexts = []

    def opened(report: str | Path, size: tuple[int, int] = DESK, **options: Any) -> Opened:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, offline=True, **options)
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.goto((report if isinstance(report, Path) else reports[report]).as_uri())
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return reports of plans, of a sweep, of a frontier and of hostile results."""
    folder = tmp_path_factory.mktemp("reports")
    found = {
        name: folder / f"{name}.html" for name in ("plan", "accumulating", "sweep", "frontier", "hostile", "script")
    }
    write(plan_file(folder), found["plan"])
    write(accumulating_plan(folder), found["accumulating"])
    write(RESULTS / "cpu", found["sweep"], read_profile(RESULTS / "calibration.toml"))
    write(RESULTS / "max-size-quick", found["frontier"])
    write(hostile_sweep(folder), found["hostile"])
    found["script"].write_text(html(rehearsal_page([hostile()], SCRIPT), date.today()))
    return found


def _table(opened: Opened) -> Locator:
    return opened.page.locator("table", has=opened.page.get_by_role("button", name="tokens/s per rank")).first


def _column(opened: Opened, title: str, only_shown: bool = True) -> list[str]:
    """Return the texts of a column from top to bottom."""
    table = _table(opened)
    titles = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    place = next(index for index, text in enumerate(titles) if text == title) + 1
    rows = "tbody tr:not([hidden])" if only_shown else "tbody tr"
    return table.locator(f"{rows} > :nth-child({place})").all_inner_texts()


@pytest.mark.parametrize("name", ["plan", "sweep", "frontier", "hostile", "script"])
def test_nothing_is_requested_and_nothing_goes_wrong(show: Show, reports: dict[str, Path], name: str) -> None:
    opened = show(name)
    opened.ask("window.scrollTo(0, document.body.scrollHeight)")
    assert [url for url in opened.requests if not url.startswith("data:")] == [reports[name].as_uri()]
    assert opened.complaints == []


@pytest.mark.parametrize("name", ["plan", "accumulating", "sweep", _slow("frontier"), "hostile", "script"])
def test_a_phone_shows_all_without_scrolling_sideways(show: Show, name: str) -> None:
    opened = show(name, PHONE)
    opened.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert opened.ask("document.documentElement.scrollWidth") <= PHONE[0]
    assert opened.ask("parseFloat(getComputedStyle(document.body).fontSize)") >= 16


def test_a_click_sorts_numbers_as_numbers_and_again_the_other_way(show: Show) -> None:
    opened = show("sweep")
    button = _table(opened).get_by_role("button", name="tokens/s per rank")
    button.click()
    speeds = [float(text.replace(",", "")) for text in _column(opened, "tokens/s per rank")]
    assert speeds == sorted(speeds)
    assert speeds[0] < 1000 < 10 * speeds[-1]
    header = _table(opened).locator("th[aria-sort]")
    assert header.get_attribute("aria-sort") == "ascending"
    button.click()
    assert [float(text.replace(",", "")) for text in _column(opened, "tokens/s per rank")] == speeds[::-1]
    assert header.get_attribute("aria-sort") == "descending"


def test_the_keyboard_sorts_words(show: Show) -> None:
    opened = show("sweep")
    button = _table(opened).get_by_role("button", name="strategy")
    button.focus()
    assert opened.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.page.keyboard.press("Enter")
    names = _column(opened, "strategy")
    assert names == sorted(names, key=str.lower)
    opened.page.keyboard.press("Tab")
    assert opened.ask("document.activeElement.textContent") == "model"
    opened.page.keyboard.press("Space")
    assert _table(opened).locator("th[aria-sort]").inner_text().strip() == "model"


def test_unknown_values_are_sorted_last_in_both_directions(show: Show) -> None:
    opened = show("sweep")
    opened.ask("document.querySelector('tbody td.number[data-number]').dataset.number = ''")
    table = opened.page.locator("table").first
    title = table.locator("th.number").nth(1)
    unknown = "[...document.querySelector('tbody').rows].findIndex((row) => row.querySelector('td[data-number=\"\"]'))"
    for _ in range(2):
        title.locator("button").click()
        assert opened.ask(unknown) == 53  # the last of 54 rows


def test_filters_work_together(show: Show) -> None:
    opened = show("sweep")
    every = _column(opened, "strategy", only_shown=False)
    box = opened.page.locator("[data-table]").first
    box.get_by_label("Filter").focus()
    opened.page.keyboard.type("no_shard bf16")
    texts = _table(opened).locator("tbody tr:not([hidden])").all_inner_texts()
    assert texts
    assert all("NO_SHARD" in text and "bf16-mixed" in text for text in texts)
    assert box.get_by_role("status").inner_text() == f"{len(texts)} of 54 rows"
    box.get_by_label("api").select_option("fsdp2")
    assert set(_column(opened, "api")) == {"fsdp2"}
    assert 0 < len(_column(opened, "api")) < len(texts)
    box.get_by_label("Filter").fill("")
    box.get_by_label("api").select_option("")
    assert _column(opened, "strategy") == every


def test_everything_is_there_without_javascript(show: Show) -> None:
    opened = show("sweep", java_script_enabled=False)
    assert opened.page.locator("tbody tr").count() > 54
    assert not opened.page.get_by_label("Filter").first.is_visible()
    assert opened.page.get_by_role("columnheader", name="strategy").first.is_visible()


def test_the_skip_link_leads_to_the_answer(show: Show) -> None:
    opened = show("plan")
    opened.page.keyboard.press("Tab")
    assert opened.ask("document.activeElement.className") == "skip"
    assert opened.ask("document.activeElement.getBoundingClientRect().left") >= 0
    opened.page.keyboard.press("Enter")
    assert opened.ask("document.activeElement.id") == "answer"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(show: Show, scheme: str) -> None:
    """WCAG 2 asks 4.5 to 1 of texts of this size."""
    opened = show("plan", color_scheme=scheme)
    poor = opened.ask(_CONTRAST)
    assert poor["checked"] > 50
    assert poor["found"] == []


_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => color.slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = rgba(getComputedStyle(each).backgroundColor);
      if (color[3] > 200) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  let checked = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const [one, other] = [light(rgba(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    checked += 1;
    if ((one + 0.05) / (other + 0.05) < 4.5) found.push(`${element.className} ${element.textContent.slice(0, 40)}`);
  }
  return { checked, found };
}"""


@pytest.mark.parametrize("name", ["plan", "sweep", _slow("frontier")])
def test_it_prints_on_a4_with_tables_uncut_and_details_open(show: Show, name: str, tmp_path: Path) -> None:
    opened = show(name, A4)
    opened.page.pdf(path=tmp_path / "report.pdf", prefer_css_page_size=True)
    data = (tmp_path / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF")
    assert len(data) > 20_000
    opened.page.emulate_media(media="print")
    opened.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.ask("[...document.querySelectorAll('details')].every((each) => each.open)")
    assert opened.page.get_by_label("Filter").count() == 0 or not opened.page.get_by_label("Filter").first.is_visible()
    for size, tables in ((A4, "section:not(.wide) table"), (A4_SIDEWAYS, "section.wide table")):
        opened.page.set_viewport_size({"width": size[0], "height": size[1]})
        widths = opened.ask(f"[...document.querySelectorAll('{tables}')].map((each) => each.scrollWidth)")
        assert all(width <= size[0] for width in widths), widths


def test_hostile_names_do_not_run(show: Show) -> None:
    opened = show("hostile")
    text = opened.page.locator("body").inner_text()
    assert all(name in text for name in (SCRIPT, IMAGE, STYLE))
    opened.page.get_by_role("button", name="strategy").first.click()
    opened.page.get_by_label("Filter").first.fill(SCRIPT.lower())
    opened.page.wait_for_timeout(100)
    assert opened.ask("typeof window.hacked") == "undefined"


def test_even_a_script_that_got_in_would_not_run(show: Show, reports: dict[str, Path]) -> None:
    """The page's own policy allows one script, by its hash, and no request."""
    path = reports["hostile"].with_name("broken.html")
    text = reports["hostile"].read_text()
    intruder = f"{SCRIPT}<img src=https://example.com/x.png><p onclick='window.hacked = 1'>click</p>"
    path.write_text(text.replace("<main>", f"<main>{intruder}"))
    opened = show(path)
    opened.page.get_by_text("click", exact=True).click()
    assert opened.ask("typeof window.hacked") == "undefined"
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)
