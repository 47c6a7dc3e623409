"""Printing: neither rich nor a terminal interprets anything in a text from outside."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

import fsdp_bench
from fsdp_bench.cli.common.printing import progress_bar
from fsdp_bench.report import terminal
from fsdp_bench.report.table import Column, table_lines
from fsdp_bench.spec.errors import printable, shortened, shown

HOSTILE = "[/red][link=file:///etc]x[/link] :smile: \x1b]0;t\x07\x1b[2J\x9b31m\u202e\n\udcff"
SHOWN = r"[/red][link=file:///etc]x[/link] :smile: \x1b]0;t\x07\x1b[2J\x9b31m\u202e\n\udcff"


def on_a_terminal() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, width=300, force_terminal=True, color_system=None), output


def test_control_characters_are_shown_as_escapes_and_all_else_stays() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("é 中文 😀 $x$") == "é 中文 😀 $x$"


def test_a_note_a_table_and_a_progress_bar_print_markup_and_escapes_as_they_are_written() -> None:
    console, output = on_a_terminal()
    terminal.note(console, f"note: {HOSTILE}", "yellow")
    terminal.note_lines(console, table_lines([Column("name", (HOSTILE,))], 200))
    with Progress(*progress_bar(console).columns, console=console, auto_refresh=False) as progress:
        terminal.describe(progress, progress.add_task("", total=1), HOSTILE)
    assert output.getvalue().count(SHOWN) >= 3
    assert "\x07" not in output.getvalue()
    assert "\x9b" not in output.getvalue()


def test_lines_and_answers_print_escapes_as_they_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    terminal.print_line(HOSTILE)
    terminal.print_line(HOSTILE, error=True)
    terminal.print_answer(HOSTILE, "red")
    terminal.print_lines(f"{HOSTILE}\nsecond")
    printed = capsys.readouterr()
    assert printed.out.split("\n")[:2] == [SHOWN, SHOWN]
    assert printed.out.endswith("\\udcff\nsecond\n")
    assert printed.err == f"{SHOWN}\n"


def test_everything_is_printed_by_one_module() -> None:
    allowed = {"report/terminal.py", "report/table.py", "cli/main.py"}  # a table is rendered into a text
    package = Path(fsdp_bench.__file__).parent
    own = [path for folder in ("cli", "report", "sweep") for path in (package / folder).glob("*.py")]
    prints = re.compile(r"(?<![\w.])(print|Console|console\.print|click\.secho)\(")
    found = {str(path.relative_to(package)) for path in own if prints.search(path.read_text())}
    assert found - allowed == set()


@pytest.mark.parametrize(
    "value",
    ["x" * 5100, [[1] * 3000], 10**4000, 16**5000, "\x1b[2J" * 100],
    ids=["text", "list", "a", "b", "escapes"],
)
def test_a_value_in_a_message_is_cut_to_80_characters_and_escaped(value: object) -> None:
    text = shown(value)
    assert len(text) < 120
    assert text.isprintable()


def test_the_middle_of_a_long_message_is_left_out() -> None:
    line = shortened("begin " + "x" * 5000 + " end", 480)
    assert line.startswith("begin ")
    assert line.endswith(" end")
    assert "(5010 characters)" in line
    assert len(line) == 480
