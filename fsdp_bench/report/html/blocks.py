"""The parts of a page: sections, and in them facts, tables and the charts of report/charts/description.py.

Texts are plain; templates escape them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Block(Protocol):
    """A part of a section; templates/blocks.html has a macro of the name ``kind``."""

    @property
    def kind(self) -> str:
        """The name of its macro."""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    is_warning: bool = False
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

    title: str
    is_number: bool = False
    choices: tuple[str, ...] = ()
    """The texts to filter by; none if there are too many."""


@dataclass(frozen=True)
class Row:
    """One row of a table; the first cell names it."""

    cells: tuple[Cell, ...]
    is_marked: bool = False


@dataclass(frozen=True)
class Table:
    """A table that sorts and filters."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    shared: tuple[tuple[str, str], ...] = ()
    """Columns that have the same text in all rows, and that text."""
    kind: str = "table"

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


def table(caption: str, titles: Sequence[str], rows: Sequence[Row], numbers: Sequence[str] = ()) -> Table:
    """Return a table; columns of words with the same text in all rows are named above it, and empty ones left out."""
    assert all(len(row.cells) == len(titles) for row in rows), "a cell for every column"
    columns, kept, shared = [], [], []
    for place, title in enumerate(titles):
        texts = tuple(dict.fromkeys(row.cells[place].text for row in rows))
        if place and not any(texts):
            continue
        if place and len(rows) > 1 and len(texts) == 1:
            shared.append((title, texts[0]))
            continue
        columns.append(Column(title, title in numbers, () if title in numbers else _choices(texts, len(rows))))
        kept.append(place)
    narrowed = tuple(Row(tuple(row.cells[place] for place in kept), row.is_marked) for row in rows)
    return Table(caption, tuple(columns), narrowed, tuple(shared))


def _choices(texts: tuple[str, ...], num_rows: int) -> tuple[str, ...]:
    """Return the texts to filter by: a few short ones."""
    is_few = num_rows >= FEWEST_TO_FILTER and 1 < len(texts) <= MOST_CHOICES
    return tuple(sorted(texts)) if is_few and max(map(len, texts)) <= LONGEST_CHOICE else ()


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away on a screen."""

    title: str
    blocks: tuple[Block, ...]
    kind: str = "details"


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
    notes: tuple[str, ...] = field(default=())
    """Files that could not be read."""
