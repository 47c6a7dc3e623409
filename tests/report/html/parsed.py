"""Reads a report as a browser would: its elements, its texts and its tables."""

from __future__ import annotations

from html.parser import HTMLParser

Attributes = dict[str, str | None]


class ParsedPage(HTMLParser):
    """The elements of a page with their attributes, the text outside of scripts and styles, the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Attributes]] = []
        self.text = ""
        self.tables: list[list[list[tuple[str, Attributes]]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append(("", dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text += data
        if {"td", "th"} & set(self._open):
            text, attributes = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (text + data, attributes)

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attributes in self.elements for key, value in attributes.items() if key == name]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def column(self, title: str, table: int = 0) -> list[tuple[str, str | None]]:
        """Return the texts of a column, and the numbers that it is sorted by."""
        head, *rows = self.tables[table]
        place = [text for text, _ in head].index(title)
        return [(row[place][0], row[place][1].get("data-number")) for row in rows]
