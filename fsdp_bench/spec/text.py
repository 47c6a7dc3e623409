"""Makes text from outside safe to print: names, paths, values and messages from users, files or torch."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    r"""Return text as one line. Control characters are shown as escapes, ``\x1b``.

    All characters for which ``str.isprintable`` is false are escaped: C0 and C1 controls, newlines, marks that change
    the direction of writing, and bytes of a path that are not UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def printable_lines(text: str) -> str:
    """Return text of several lines, each made printable."""
    return "\n".join(map(printable, text.split("\n")))


def in_file_name(text: str, most: int = 120) -> str:
    """Return text as a part of a file's name: letters, digits, ``.`` and ``-``, at most ``most`` of them."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:most].strip("-")


def shortened(text: str, most: int) -> str:
    """Return text as one printable line of at most ``most`` characters. The middle of a longer text is cut."""
    line = printable(text)
    if len(line) <= most:
        return line
    cut = f" ... ({len(line)} characters) ... "
    kept = most - len(cut)
    return f"{line[: kept * 2 // 3]}{cut}{line[-(kept // 3) :]}"
