"""Runs the commands and the Python of a page's blocks, in order, in one working directory.

Marks in a page:

    ```console           lines that begin with ``$ fsdp-bench`` or ``$ python -m tools.validate`` are run, with 80
                         columns; their output follows them, standard error included. ``$ echo $?`` prints the exit code
                         of the command above, and must follow every command whose exit code is not 0. ``> FILE`` writes
                         the output to a file, which must equal the one of that name beside the page, if there is one
    ```python            lines that begin with ``>>>`` are run as doctests; the blocks of a page share their names
    <!-- file: NAME -->  the block below is written to a file of that name before anything below it runs
    <!-- not run: WHY -->  the block below is not run; where WHY is CUDA_BUILD, ``make test-rehearsal`` runs it

In an output, a line ``...`` stands for any number of lines, and ``...`` inside a line for any text. Blocks of other
languages are not run. The working directory is new and has the repository's ``results`` and ``sweeps`` in it.
"""

import difflib
import doctest
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.cli import dry_run
from fsdp_bench.cli.main import main
from fsdp_bench.report.text import plan as plan_text
from fsdp_bench.sweep.config import trial
from tests.conftest import unchanged_process
from tools.validate.__main__ import main as validate

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
SHARED = ("results", "sweeps")
"""Folders of the repository that commands on pages read."""
PICTURES = ROOT / "docs" / "pictures"
"""The pictures of pages. A command on a page draws each, under the same file name."""

SCREENSHOTS = {"report.png": "tests/report/html/screenshot.py"}
"""Pictures that a script draws, and not a command on a page."""

CUDA_BUILD = "needs PyTorch's CUDA build (make test-rehearsal)"
"""The reason for not running a block, a rehearsal, with torch's CPU build."""


class _DayOfThePages(date):
    """A date that stands still, because ``plan`` prints the age of the catalogue's prices."""

    @classmethod
    def today(cls) -> date:
        return date(2026, 11, 26)


RUN: dict[str, Callable[[list[str]], object]] = {
    "fsdp-bench ": lambda words: main(words[1:]),
    "python -m tools.validate ": lambda words: validate(words[3:]),
}
"""By the beginning of a command, what runs its words."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NOTE = re.compile(r"<!-- (file|not run): (.+?) -->\n+\Z")
_FILE_NAME = re.compile(r"[\w./-]+\.(?:csv|html|json|md|png|py|svg|toml)\b")
_DOCTEST_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    start: int
    """The index in the page at which its text begins."""
    file: str | None
    not_run: str | None


@dataclass
class PageResult:
    failures: list[str] = field(default_factory=list)
    replacements: list[tuple[int, int, str]] = field(default_factory=list)
    """Outputs to replace: begin and end in the page, and the new text."""
    num_run: int = 0

    def updated(self, page: str) -> str:
        for start, end, text in sorted(self.replacements, reverse=True):
            page = page[:start] + text + page[end:]
        return page


def blocks(page: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(page):
        note = _NOTE.search(page, 0, found.start())
        kind, words = note.groups() if note else (None, "")
        yield Block(
            language=found[1],
            text=found[2],
            start=found.start(2),
            file=words if kind == "file" else None,
            not_run=words if kind == "not run" else None,
        )


def parts(page: str, only: str | None = None) -> list[list[Block]]:
    """Return the page's blocks that are run, grouped into parts that run independently of each other.

    All blocks of Python are one part, because they share variables. Consoles that name the same new file are another.
    """
    found: list[list[Block]] = []
    for block in blocks(page):
        if block.file is not None or block.not_run != only or not _is_run(block):
            continue
        before = [part for part in found if any(_belong_together(block, one) for one in part)]
        found = [part for part in found if part not in before]
        found.append([*(one for part in before for one in part), block])
    return found


def _is_run(block: Block) -> bool:
    return block.language == "console" or (block.language == "python" and ">>>" in block.text)


def _belong_together(one: Block, other: Block) -> bool:
    return one.language == other.language == "python" or bool(_made(one) & _made(other))


def _made(block: Block) -> set[str]:
    """Return the files that a block names and that are not in the repository: a command on the page makes them."""
    return {name for name in _FILE_NAME.findall(block.text) if not (ROOT / name).exists()}


def run_page(
    page: str, name: str, folder: Path, only: str | None = None, part: list[Block] | None = None
) -> PageResult:
    """Run a page in a folder, which gets the files that the page shows.

    Args:
        page: its text.
        name: its name in failures.
        folder: the working directory.
        only: a reason for which blocks are not run; these are run instead of the others.
        part: the only blocks to run, from ``parts``.
    """
    for shared in SHARED:
        (folder / shared).symlink_to(ROOT / shared)
    result, names = PageResult(), dict[str, Any]()
    for block in blocks(page):
        if (block.not_run != only or (part is not None and block not in part)) and block.file is None:
            continue
        if block.file is not None:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.language == "console":
            _run_console(block, folder, (ROOT / name).parent, result)
        elif block.language == "python" and ">>>" in block.text:
            _run_python(block, names, name, folder, result)
    return result


def _run_console(block: Block, folder: Path, beside: Path, result: PageResult) -> None:
    code, is_shown = 0, True
    for command, start, end in _commands(block.text):
        words = shlex.split(command, comments=True)
        if words == ["echo", "$?"]:
            output, is_shown = f"{code}\n", True
        else:
            if not is_shown:
                result.failures.append(f"exit code {code} before `$ {command}` is not shown by `$ echo $?`")
            words, file = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
            code, output = _run_command(words, folder)
            is_shown = code == 0
            if file is not None:
                (folder / file).write_text(output)
                if (beside / file).exists() and output != (beside / file).read_text():
                    result.failures.append(f"$ {command}\nprints something else than {beside / file}")
                output = ""
        result.num_run += 1
        expected = block.text[start:end]
        if not matches(expected, output):
            result.failures.append(f"$ {command}\nexpected:\n{expected}printed:\n{output}")
            result.replacements.append((block.start + start, block.start + end, shortened_as(expected, output)))
    if not is_shown:
        result.failures.append(f"exit code {code} at the end of a block is not shown by `$ echo $?`")


def _commands(text: str) -> Iterator[tuple[str, int, int]]:
    found = list(re.finditer(r"^\$ ((?:.*\\\n)*.*)\n", text, re.MULTILINE))
    ends = [following.start() for following in found[1:]] + [len(text)]
    for one, end in zip(found, ends, strict=True):
        yield one[1].replace("\\\n", " "), one.end(), end


def _run_command(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command; return its exit code and its output without trailing blanks."""
    run = next((run for start, run in RUN.items() if " ".join(words).startswith(start)), None)
    assert run is not None, f"{words[0]} is not run; make it a block of another language"
    output = io.StringIO()
    with (
        unchanged_process(folder),
        redirect_stdout(output),
        redirect_stderr(output),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.setattr(dry_run, "ANNOUNCED_AFTER_SECONDS", 1e6)  # a line that only slow machines would print
        patch.setattr(plan_text, "date", _DayOfThePages)
        patch.setattr(trial, "torch_version", lambda: "2.13.0")  # a part of a trial's ID
        try:
            code: object = run(words)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return code, re.sub(r"[ \t]+$", "", output.getvalue(), flags=re.MULTILINE)


def matches(expected: str, output: str) -> bool:
    """Return whether an output matches the expected one, in which ``...`` stands for any text."""
    pattern = ""
    for line in expected.splitlines(keepends=True):
        pattern += r"(?:.*\n)*" if line == "...\n" else ".*".join(map(re.escape, line.split("...")))
    return re.fullmatch(pattern, output) is not None


def shortened_as(expected: str, output: str) -> str:
    """Return a new output, shortened by lines ``...`` where the expected one has them.

    Of lines that changed around such a line, as many as before stay above it and below it. Expected lines that contain
    ``...`` stay if they match.
    """
    old, gaps, shown = list[str](), list[int](), list[str]()
    for line in expected.splitlines(keepends=True):
        gaps.append(len(old)) if line == "...\n" else old.append(line)
    new = output.splitlines(keepends=True)
    for what, begin, end, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        inside = [gap for gap in gaps if begin <= gap <= end and what != "equal"]
        above, below = (inside[0] - begin, end - inside[-1]) if inside else (last - first, 0)
        if above + below < last - first:
            shown += [*new[first : first + above], "...\n", *new[last - below : last]]
        else:
            shown += new[first:last]
    partly = [line for line in old if "..." in line]
    return "".join(next((was for was in partly if matches(was, now)), now) for now in shown)


class _Runner(doctest.DocTestRunner):
    def __init__(self) -> None:
        super().__init__(optionflags=_DOCTEST_OPTIONS)
        self.others: list[tuple[doctest.Example, str]] = []

    def report_failure(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        self.others.append((example, got))

    def report_unexpected_exception(self, out: Any, test: Any, example: doctest.Example, exc_info: Any) -> None:
        self.others.append((example, f"{exc_info[0].__name__}: {exc_info[1]}\n"))


def _run_python(block: Block, names: dict[str, Any], name: str, folder: Path, result: PageResult) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, name, name, 0)
    runner, before = _Runner(), os.getcwd()
    os.chdir(folder)
    try:
        runner.run(test, clear_globs=False)
    finally:
        os.chdir(before)
    names.update(test.globs)
    result.num_run += len(test.examples)
    starts = [0]
    for line in block.text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for example, got in runner.others:
        result.failures.append(f">>> {example.source}expected:\n{example.want}printed:\n{got}")
        first = example.lineno + example.source.count("\n")
        start, end = starts[first], starts[first + example.want.count("\n")]
        result.replacements.append((block.start + start, block.start + end, got))
