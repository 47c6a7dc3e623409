"""Makes text from outside safe to print: names, paths, values and messages that this package did not write."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    r"""Return text as one line without control characters: what a terminal would obey is shown as an escape, ``\x1b``.

    That is every character of which ``str.isprintable`` is false: C0 and C1 controls, newlines, marks that change the
    direction of writing, and the bytes of a path that are not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def printable_lines(text: str) -> str:
    """Return text of several lines, each of them printable."""
    return "\n".join(map(printable, text.split("\n")))


def in_file_name(text: str, most: int = 120) -> str:
    """Return text as a part of a file's name: letters, digits, ``.`` and ``-``, at most so many of them."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:most].strip("-")


def shortened(text: str, most: int) -> str:
    """Return one printable line of at most so many characters; the middle of a longer one is left out."""
    line = printable(text)
    if len(line) <= most:
        return line
    cut = f" ... ({len(line)} characters) ... "
    kept = most - len(cut)
    return f"{line[: kept * 2 // 3]}{cut}{line[-(kept // 3) :]}"
