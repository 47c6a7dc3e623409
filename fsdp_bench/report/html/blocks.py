"""The parts of a page: sections, and in them facts, tables and the charts of report/charts/description.py.

Texts are plain; templates escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fsdp_bench.report.charts.description import Chart
from fsdp_bench.report.text.common import UNKNOWN


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Facts:
    """Names and values, one line each."""

    rows: tuple[tuple[str, str], ...]
    kind: str = "facts"


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Tiles:
    """The numbers of the headline."""

    tiles: tuple[Tile, ...]
    kind: str = "tiles"


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    number: float | None = None
    """The value by which a column of numbers is sorted. None is sorted last."""
    is_warning: bool = False


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    cells: tuple[Cell, ...]
    is_number: bool = False
    title: str = ""

    @property
    def choices(self) -> list[str]:
        """The texts to filter by: a few short ones, of a column of words."""
        texts = {cell.text for cell in self.cells}
        is_few = len(self.cells) >= FEWEST_TO_FILTER and 1 < len(texts) <= MOST_CHOICES and not self.is_number
        return sorted(texts) if is_few and max(map(len, texts)) <= LONGEST_CHOICE else []


def words(texts: Iterable[str]) -> Column:
    """Return a column of words."""
    return Column(tuple(map(Cell, texts)))


def numbers(values: Iterable[float | None], form: Callable[[Any], str] = str, without: str = UNKNOWN) -> Column:
    """Return a column of numbers.

    Args:
        values: the values.
        form: the function that formats one.
        without: what stands in the place of None.
    """
    return Column(tuple(Cell(without) if one is None else Cell(form(one), one) for one in values), is_number=True)


@dataclass(frozen=True)
class Table:
    """A table that sorts and filters."""

    caption: str
    columns: tuple[Column, ...]
    """The columns; cells of the first one name the rows."""
    shared: tuple[tuple[str, str], ...] = ()
    """Columns that have the same text in all rows, and that text."""
    marked: Collection[int] = ()
    """The places of rows that are marked."""
    kind: str = "table"

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The cells of each row."""
        return list(zip(*(column.cells for column in self.columns), strict=True))

    @property
    def is_filtered(self) -> bool:
        """Whether it has so many rows that filters help."""
        return len(self.rows) >= FEWEST_TO_FILTER


FEWEST_TO_FILTER = 8
"""Tables of fewer rows have no filters."""
MOST_CHOICES = 8
MOST_COLUMNS = 12
"""Most columns of a table that an upright page holds."""
LONGEST_CHOICE = 30
"""Only texts of at most so many characters are filtered by."""


def table(caption: str, columns: Mapping[str, Column], marked: Collection[int] = ()) -> Table:
    """Return a table; columns of words with the same text in all rows are named above it, and empty ones left out.

    Args:
        caption: its title.
        columns: the columns by their titles.
        marked: the places of rows that are marked.
    """
    kept, shared = [], []
    for place, (title, column) in enumerate(columns.items()):
        texts = {cell.text for cell in column.cells}
        if place and len(column.cells) > 1 and len(texts) == 1 and any(texts):
            shared.append((title, column.cells[0].text))
        elif not place or any(texts):
            kept.append(replace(column, title=title))
    return Table(caption, tuple(kept), tuple(shared), marked)


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away on a screen."""

    title: str
    blocks: tuple[Block, ...]
    kind: str = "details"


Block: TypeAlias = Text | Facts | Tiles | Table | Details | Chart
"""A part of a section; templates/blocks.html has a macro of the name ``kind``."""


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    blocks: tuple[Block, ...]
    link: str | None = None
    """Its name in the list of sections. None: the title; empty: it is not in the list."""

    @property
    def name(self) -> str:
        """Its name in the list of sections; empty if it is not there."""
        return self.title if self.link is None else self.link

    @property
    def is_wide(self) -> bool:
        """Whether a table is so wide that it is printed on a page on its side."""
        return any(isinstance(block, Table) and len(block.columns) > MOST_COLUMNS for block in self.blocks)


@dataclass(frozen=True)
class Page:
    """A page: the answer first."""

    title: str
    source: str
    """``predicted``, ``measured`` or ``rehearsed``."""
    answer: str
    reason: str = ""
    lead: tuple[Block, ...] = ()
    """Blocks shown next to the answer."""
    sections: tuple[Section, ...] = ()
    notes: tuple[str, ...] = ()
    """Files that could not be read."""
