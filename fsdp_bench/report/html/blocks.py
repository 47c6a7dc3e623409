"""The parts of a page: sections with facts, tables and charts. Texts are plain; templates escape them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from fsdp_bench.report.charts.description import Chart
from fsdp_bench.report.table import Column


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Facts:
    """Names and values, one line each."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """A table that sorts and filters."""

    caption: str
    columns: tuple[Column, ...]
    shared: tuple[tuple[str, str], ...] = ()
    """Columns that have the same text in all rows, and that text."""
    marked: Collection[int] = ()
    """The places of rows that are marked."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.columns[0].cells)

    @property
    def is_filtered(self) -> bool:
        """Whether it has so many rows that filters help."""
        return self.num_rows >= FEWEST_TO_FILTER

    @property
    def filters(self) -> dict[str, list[str]]:
        """Columns to filter by, with their texts: columns of words with a few short ones."""
        texts = {column.name: sorted(set(column.cells)) for column in self.columns if not column.is_number}
        few = {name: own for name, own in texts.items() if 1 < len(own) <= MOST_CHOICES}
        return {name: own for name, own in few.items() if max(map(len, own)) <= LONGEST_CHOICE}


FEWEST_TO_FILTER = 8
"""Tables of fewer rows have no filters."""
MOST_CHOICES = 8
MOST_COLUMNS = 12
"""Most columns of a table that an upright page holds."""
LONGEST_CHOICE = 30
"""Only texts of at most so many characters are filtered by."""


def table(caption: str, columns: Mapping[str, Column], marked: Collection[int] = ()) -> Table:
    """Return a table; columns with the same text in all rows are named above it, and empty ones left out."""
    kept, shared = [], []
    for place, (title, column) in enumerate(columns.items()):
        texts = {*column.cells}
        if place and len(column.cells) > 1 and len(texts) == 1 and any(texts):
            shared.append((title, column.cells[0]))
        elif not place or any(texts):
            kept.append(replace(column, header=title))
    return Table(caption, tuple(kept), tuple(shared), marked)


@dataclass(frozen=True)
class Details:
    """Blocks that are folded away on a screen."""

    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = Text | Facts | Table | Details | Chart
"""A part of a section; templates/blocks.html has a macro for each."""


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
