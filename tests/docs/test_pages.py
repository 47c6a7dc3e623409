"""Every command and every Python example of README.md and docs/ runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fsdp_bench
from fsdp_bench.cli.main import COMMANDS
from tests.docs.pages import CUDA_BUILD, PAGES, PICTURES, ROOT, SCREENSHOTS, blocks, matches, run_page, shortened_as


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_says(name: str, tmp_path: Path) -> None:
    """Where outputs changed on purpose: ``python -m tests.docs.update``, and read ``git diff``."""
    result = run_page((ROOT / name).read_text(), name, tmp_path)
    assert not result.failures, "\n\n".join(result.failures)


@pytest.mark.parametrize("name", PAGES)
def test_its_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_guide_has_every_command() -> None:
    commands = re.findall(r"^\$ fsdp-bench ([a-z-]+)", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE)
    assert set(commands) == set(COMMANDS)


def test_python_page_names_everything_public() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    assert not [name for name in fsdp_bench.__all__ if f"`{name}`" not in text and name != "__version__"]


def test_readme_can_be_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_pictures_are_drawn_by_commands_of_the_pages() -> None:
    consoles = [block.text for name in PAGES for block in blocks((ROOT / name).read_text()) if not block.not_run]
    for picture in PICTURES.iterdir():
        if picture.name in SCREENSHOTS:
            assert (ROOT / SCREENSHOTS[picture.name]).exists()
        else:
            assert any(picture.name in text for text in consoles), picture.name


def test_few_commands_are_not_run() -> None:
    """What trains takes longer than a test may; the rest is run, rehearsals in on_stand_in/rehearse/test_guide.py."""
    found = [(name, block) for name in PAGES for block in blocks((ROOT / name).read_text())]
    consoles = [block for _, block in found if block.language == "console"]
    assert sum(block.not_run not in (None, CUDA_BUILD) for block in consoles) <= len(consoles) / 5


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n...\nd\n", "a\nb\nc\nd\n", True),
        ("a\n...\nd\n", "a\nd\n", True),
        ("a\n...\nd\n", "a\nb\nc\n", False),
        ("took ... s\n", "took 1.5 s\n", True),
        ("took ... s\n", "took 1.5 minutes\n", False),
        ("", "a\n", False),
    ],
)
def test_dots_stand_for_what_is_left_out(expected: str, output: str, same: bool) -> None:
    assert matches(expected, output) is same


@pytest.mark.parametrize(
    ("expected", "output", "written"),
    [
        ("a\n...\nd\n", "A\nb\nc\nD\n", "A\n...\nD\n"),
        ("a\n...\n", "A\nb\nc\nD\n", "A\n...\n"),
        ("a\n...\nd\n", "A\nD\n", "A\nD\n"),
        ("took ... s\nb\n", "c\ntook 2 s\nd\n", "c\ntook ... s\nd\n"),
        ("", "a\n", "a\n"),
        ("a\n\n...\n", "A\nb\n\nC\n\nD\n", "A\nb\n\n...\n"),
        ("a\n...\n\nd\n", "A\nb\n\nD\ne\n", "A\n...\n\nD\ne\n"),
    ],
)
def test_an_updated_output_is_shortened_as_before(expected: str, output: str, written: str) -> None:
    assert shortened_as(expected, output) == written


def test_what_architecture_names_is_there() -> None:
    """``path.py:name`` is a file of the package and something defined in it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.findall(r"`([\w/]+\.py)(?::(\w+))?`", text)
    assert len(found) > 40
    for path, name in found:
        file = ROOT / "fsdp_bench" / path
        assert file.exists() or path == "__init__.py", path
        assert not name or re.search(rf"^(def|class) {name}\b", file.read_text(), re.MULTILINE), f"{path}:{name}"
