"""Lines of a script that hold memory at the peak, in two rehearsals: which line of A is which line of B."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain

from msgspec.structs import replace

from fsdp_bench.plan.compare.difference import Difference, largest_first
from fsdp_bench.spec.subprocesses.rehearsal import HeldLine, SourceLine

_OTHER_CHECKOUT = f"{os.pardir}{os.sep}{os.pardir}{os.sep}{os.pardir}"
_ALIKE = 0.6
"""The similarity of an edited line with what it was, by difflib; its documentation calls this a close match."""
_KEYS: tuple[Callable[[SourceLine], Hashable], ...] = (
    lambda line: (line.file, line.function, line.text),
    lambda line: line.text and (line.file, line.text),  # the function has another name
    lambda line: line.text and (line.function, line.text),  # the file has
)


@dataclass(frozen=True)
class LineDifference(Difference):
    """The memory that one line holds at the peaks of A and B."""

    line: SourceLine | None
    """B's; A's where B has none. None for autograd's thread, which has no Python stack."""
    before: SourceLine | None
    """A's, if it is another: it has moved, or its text has changed."""


def portable(line: SourceLine | None, folder: str | None) -> SourceLine | None:
    """Return a line with its file below the folder of packages, or as it is seen from the command's folder."""
    if line is None:
        return None
    for packages in ("site-packages", "dist-packages"):
        if f"{os.sep}{packages}{os.sep}" in line.file:
            return replace(line, file=line.file.rpartition(f"{packages}{os.sep}")[2])
    file = os.path.normpath(line.file)
    if folder is not None and os.path.isabs(file):
        seen = os.path.relpath(file, folder)
        file = file if seen.startswith(_OTHER_CHECKOUT) else seen
    return replace(line, file=file)


def line_differences(a: Sequence[HeldLine], b: Sequence[HeldLine]) -> tuple[LineDifference, ...]:
    """Return the differences by line, the largest first. Lines are portable."""
    same = matched(_lines(a), _lines(b))
    was = {new: old for old, new in same.items() if old != new}
    old_bytes, new_bytes = _by_line(a, same), _by_line(b, {})
    return largest_first(
        LineDifference(line_name(*key), old_bytes[key], new_bytes[key], key[0], was.get(key[0]) if key[0] else None)
        for key in dict.fromkeys((*new_bytes, *old_bytes))
    )


def matched(a: Iterable[SourceLine], b: Iterable[SourceLine]) -> dict[SourceLine, SourceLine]:
    """Return the line of B that each line of A is, whatever was inserted above it.

    Lines with the same text are the same: in the same function, else in the same file, else in a function of the same
    name; of several, in their order. An edited line is the one in the same function with the most similar text.
    """
    old, new = (sorted(set(lines), key=lambda one: (one.file, one.line)) for lines in (a, b))
    found: dict[SourceLine, SourceLine] = {}
    for key in _KEYS:
        left, taken = defaultdict(list), set(found.values())
        for line in (line for line in new if line not in taken):
            left[key(line)].append(line)
        for line in (line for line in old if line not in found):
            if key(line) and left[key(line)]:
                found[line] = left[key(line)].pop(0)
    for line in (line for line in old if line not in found):
        taken = set(found.values())
        near = [one for one in new if one not in taken and (one.file, one.function) == (line.file, line.function)]
        best = max(near, key=lambda one: _alike(line.text, one.text), default=None)
        if best is not None and _alike(line.text, best.text) >= _ALIKE:
            found[line] = best
    return found


def _alike(old: str, new: str) -> float:
    return SequenceMatcher(None, old, new, autojunk=False).ratio() if old and new else 1.0


_Key = tuple[SourceLine | None, SourceLine | None]


def _by_line(held: Iterable[HeldLine], names: dict[SourceLine, SourceLine]) -> Counter[_Key]:
    found = Counter[_Key]()
    for one in held:
        line, own = (line and names.get(line, line) for line in (one.line, one.user_line))
        found[line, own] += one.num_bytes
    return found


def _lines(held: Iterable[HeldLine]) -> Iterable[SourceLine]:
    return filter(None, chain.from_iterable((one.line, one.user_line) for one in held))


def line_name(line: SourceLine | None, own: SourceLine | None) -> str:
    """Return a line as ``model.py:61``, with the user's line that called it where that is another."""
    if line is None:
        return "backward, by autograd"
    called = "" if own is None or own == line else f", called from {own.file}:{own.line}"
    return f"{line.file}:{line.line}{called}"
