"""Every command and every Python example of README.md and docs/ runs, and prints what the page says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_bench
from fsdp_bench.cli.main import COMMANDS
from tests.docs.pages import (
    CUDA_BUILD,
    PAGES,
    PICTURES,
    ROOT,
    SCREENSHOTS,
    blocks,
    matches,
    parts,
    run_page,
    shortened_as,
)

SLOW = {
    "fsdp-bench plan --model Llama-3.1-8B --code huggingface --tokens 1T --deadline 30d": "README.md",  # all servers
    "fsdp-bench plan --model Llama-3.1-8B --tokens 100B --deadline 30d"
    " --server p4de.24xlarge,p5.48xlarge,a3-highgpu-8g --nodes 1-8": "docs/questions.md",
    "fsdp-bench plan --model Llama-3.1-8B --tokens 1T --deadline 60d --server p5.48xlarge --nodes 1-8"
    " --global-batch 4M": "docs/guide/plan.md",
    "python -m tools.validate --against published-sizes"
    " --chart max-size-published-2022.png": "docs/validation/published.md",
}
"""Long commands, which run in ``make validate``. Tests of the same commands with less work run always."""


def _cases() -> Iterator[object]:
    """Yield each page's parts as cases, so that two cores share the longest page."""
    for name in PAGES:
        for number, part in enumerate(parts((ROOT / name).read_text())):
            text = "".join(block.text for block in part)
            is_slow = any(f"$ {command}\n" in text and name == page for command, page in SLOW.items())
            first = re.search(r"^(?:\$ fsdp-bench|\$ python -m|>>>) (\S+)", text, re.MULTILINE)
            yield pytest.param(
                *(name, number), id=f"{name} {number} {first[1]}", marks=pytest.mark.slow if is_slow else ()
            )


@pytest.mark.parametrize(("name", "number"), list(_cases()))
def test_a_page_prints_what_it_says(name: str, number: int, tmp_path: Path) -> None:
    """If outputs changed on purpose, run ``python -m tests.docs.update`` and read ``git diff``."""
    page = (ROOT / name).read_text()
    result = run_page(page, name, tmp_path, part=parts(page)[number])
    assert result.num_run
    assert not result.failures, "\n\n".join(result.failures)


def test_each_slow_command_is_on_its_page() -> None:
    for command, page in SLOW.items():
        assert f"$ {command}\n" in (ROOT / page).read_text()


def test_blocks_that_share_variables_or_files_are_one_part() -> None:
    first, second = "```console\n{}\n```\n", "```python\n>>> {}\n```\n"
    third = "<!-- not run: x -->\n" + first
    page = (
        first.format("$ fsdp-bench record -o own.json")
        + second.format("x = 1")
        + third.format("$ fsdp-bench sweep")
        + first.format("$ fsdp-bench servers")
        + second.format("x")
        + first.format("$ fsdp-bench predict --recorded own.json")
        + first.format("$ fsdp-bench report README.md")
        + first.format("$ fsdp-bench servers README.md")
    )
    found = [[block.text.split()[-1] for block in part] for part in parts(page)]
    assert found == [["servers"], ["1", "x"], ["own.json", "own.json"], ["README.md"], ["README.md"]]


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_to_existing_files_and_headings(name: str) -> None:
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


def test_the_guide_shows_every_command() -> None:
    text = "\n".join((ROOT / name).read_text() for name in PAGES if name.startswith("docs/guide/"))
    assert set(re.findall(r"^\$ fsdp-bench ([a-z-]+)", text, re.MULTILINE)) == set(COMMANDS)


def test_the_python_page_names_everything_public() -> None:
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


def test_at_most_a_fifth_of_the_consoles_is_not_run() -> None:
    """Training takes too long for a test. tests/on_stand_in/rehearse/test_gpu_tests.py runs the rehearsals."""
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
def test_dots_stand_for_any_text(expected: str, output: str, same: bool) -> None:
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
        ("a\n...\nc\nd\n...\nf\n", "A\nb\nc\nD\ne\nF\n", "A\n...\nc\nD\n...\nF\n"),
        ("a\n...\nc\n...\n", "A\nb\n", "A\n...\n"),
        ("a\n...\n\nd\n", "A\nb\n\nD\ne\n", "A\n...\n\nD\ne\n"),
    ],
)
def test_an_updated_output_is_shortened_where_the_old_one_was(expected: str, output: str, written: str) -> None:
    assert shortened_as(expected, output) == written


def test_a_table_beside_a_page_is_what_its_command_prints(tmp_path: Path) -> None:
    page = "```console\n$ fsdp-bench servers > rehearsed.txt\n```\n"
    (failure,) = run_page(page, "docs/validation/rehearsed.md", tmp_path).failures
    assert "prints something else than" in failure
    assert "p5.48xlarge" in (tmp_path / "rehearsed.txt").read_text()


def test_files_and_names_in_architecture_md_exist() -> None:
    """``path.py:name`` names a file of the package or of tests/, and a function or class in it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = re.findall(r"`([\w/]+\.py)(?::(\w+))?`", text)
    assert len(found) > 40
    for path, name in found:
        file = ROOT / path if path.startswith("tests/") or path == "setup.py" else ROOT / "fsdp_bench" / path
        assert file.exists() or path == "__init__.py", path
        assert not name or re.search(rf"^(def|class) {name}\b", file.read_text(), re.MULTILINE), f"{path}:{name}"
