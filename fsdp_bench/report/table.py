"""Tables that fit the terminal: values that all rows share are printed once above, wide tables omit columns. As CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

from fsdp_bench.report.terminal import terminal_width, wrapped
from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.errors import printable

if TYPE_CHECKING:
    from rich.measure import Measurement
    from rich.table import Table

    from fsdp_bench.plan.table import Row

_LONGEST_WORD = 40
"""Most characters of a word that is never broken over two lines of a cell."""
_UNLIMITED = 1000
"""A terminal width at which no table is wrapped."""


@dataclass(frozen=True)
class Column:
    """One column of a table, on the terminal or a page: its header, and the cell of every row."""

    header: str
    """The header; it may contain a line break to be as narrow as the cells."""
    cells: tuple[str, ...]
    is_number: bool = False
    """Whether the column is aligned on the right."""
    drop_priority: int = 0
    """If the table is too wide, the column with the highest priority is left out first; 0 is wrapped instead."""
    most_characters: int | None = None
    """Characters of a line above which a cell is wrapped, however wide the table may be."""
    values: tuple[float | None, ...] = ()
    """The numbers by which a page sorts its rows; None is sorted last."""
    warnings: tuple[bool, ...] = ()
    """Whether each cell is a warning."""

    @property
    def name(self) -> str:
        """The header on one line."""
        return self.header.replace("-\n", "").replace("\n", " ")

    @property
    def is_shared(self) -> bool:
        """Whether all rows have the same text; False for numbers, which may be equal by chance."""
        is_constant = len(self.cells) > 1 and len(set(self.cells)) == 1
        return is_constant and not (self.is_number and self.cells[0].lstrip("+-")[:1].isdigit())


def words(texts: Iterable[str]) -> Column:
    """Return a column of words, without its header."""
    return Column("", tuple(texts))


def numbers(values: Iterable[float | None], form: Callable[[Any], str] = str, without: str = UNKNOWN) -> Column:
    """Return a column of numbers, without its header; ``without`` stands in the place of None."""
    found = tuple(values)
    return Column("", tuple(without if one is None else form(one) for one in found), is_number=True, values=found)


def titled(columns: Mapping[str, Column], droppable: Sequence[str] = ()) -> list[Column]:
    """Return columns with their headers. Those of ``droppable`` are left out, in this order, if it is too wide."""
    places = {header: len(droppable) - index for index, header in enumerate(droppable)}
    return [replace(one, header=header, drop_priority=places.get(header, 0)) for header, one in columns.items()]


def table_columns(
    headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = (), droppable: Sequence[str] = ()
) -> list[Column]:
    """Return the columns of rows: ``numbers`` are aligned on the right, ``droppable`` left out first, in order."""
    places = {header: len(droppable) - index for index, header in enumerate(droppable)}
    cells = list(zip(*rows, strict=True)) or [()] * len(headers)
    right = set(numbers)
    return [
        Column(header, tuple(own), header in right, places.get(header, 0))
        for header, own in zip(headers, cells, strict=True)
    ]


def fits_width(columns: Sequence[Column], others: int) -> bool:
    """Whether columns fit the terminal beside others of so many characters, without text of theirs on two lines."""
    return _needed(columns).maximum + others <= terminal_width()


def table_lines(columns: Sequence[Column], width: int | None = None, indent: int = 0) -> list[str]:
    """Return a table's lines, none longer than the width, by default the terminal's. The first column always stays."""
    from rich.console import Console

    width = width or terminal_width()
    inner = width - indent
    first, *others = columns
    shared = [column for column in others if column.is_shared]
    shown = [first, *(column for column in others if column not in shared and any(column.cells))]
    left_out: list[Column] = []
    while (
        _needed(shown).maximum > inner and (least := max(shown, key=lambda column: column.drop_priority)).drop_priority
    ):
        shown.remove(least)
        left_out.append(least)
    while _needed(shown).minimum > inner and len(shown) > 1:  # too wide even if wrapped
        left_out.append(shown.pop(-2 if len(shown) > 2 else -1))
    common = [f"{column.name} {column.cells[0]}" for column in shared if column.cells[0] not in ("", "-")]
    lines = wrapped(f"in all rows: {'; '.join(common)}", inner) if common else []
    output = StringIO()
    Console(file=output, width=inner, markup=False, emoji=False, highlight=False, no_color=True).print(_table(shown))
    lines += [line.rstrip() for line in output.getvalue().splitlines()]
    if left_out:
        names = ", ".join(column.name for column in left_out)
        lines += wrapped(f"left out at {width} columns: {names} (a wider terminal or COLUMNS=200)", inner)
    return [" " * indent + line for line in lines]


def csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Return rows as CSV: a line of column names, then a line for each row; what is not known is empty."""
    from fsdp_bench.sweep.results.flat import csv_row

    output = StringIO()
    writer = csv.DictWriter(output, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_row({name: row[name] for name in columns}) for row in rows)
    return output.getvalue()


def _needed(columns: Sequence[Column]) -> Measurement:
    """Return the width of a table with its text columns wrapped (minimum), and without (maximum)."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(file=StringIO(), width=_UNLIMITED)
    return Measurement.get(console, console.options, _table(columns))


def _table(columns: Sequence[Column]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="none")
    for column in columns:
        words = [word for cell in (column.header, *column.cells) for word in cell.split()]
        table.add_column(
            Text(column.header),
            justify="right" if column.is_number else "left",
            overflow="fold",
            no_wrap=column.is_number,
            min_width=min(max(map(len, words), default=0), _LONGEST_WORD),
            max_width=column.most_characters,
            vertical="top",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
