"""All errors that fsdp-bench raises on purpose, and the exit codes of the command line.

FsdpBenchError
├── UserError            the user can correct it: one line, exit code 2
│   ├── SpecError        a value that is not allowed (also a ValueError)
│   ├── SweepFileError   a sweep file that cannot be read as one
│   ├── ResultsError     results that cannot be read or written
│   └── MachineError     the machine lacks what was asked for
└── WrapError            fsdp() refuses a combination that cannot work (also a ValueError)
"""

import difflib
import shlex
from collections.abc import Iterable
from enum import IntEnum

LONGEST_VALUE = 80
"""The most characters of a value that a message shows."""


class ExitCode(IntEnum):
    """The exit code of ``fsdp-bench``, for scripts."""

    DONE = 0
    """Done. If the question was whether something fits: it fits, or that is unknown."""
    CRASHED = 1
    """A trial or a dry run crashed, a check found a difference, or fsdp-bench has a bug."""
    BAD_INPUT = 2
    """An error that the user can correct: in the input, the machine or a file."""
    DOES_NOT_FIT = 3
    """Nothing of what was asked for fits."""
    INTERRUPTED = 130
    """Ctrl-C, SIGTERM, SIGHUP or a lost node. The same command resumes. 130 is 128 + SIGINT, as in shells."""


class FsdpBenchError(Exception):
    """The base class of all errors of fsdp-bench."""

    exit_code = ExitCode.BAD_INPUT


class UserError(FsdpBenchError):
    """An error that the user can correct. The message is one line: what is wrong, where, and what is allowed."""


class SpecError(UserError, ValueError):
    """A value that is not allowed."""


class SweepFileError(UserError):
    """A sweep file that cannot be read as one."""


class ResultsError(UserError):
    """Results that cannot be read or written."""


class MachineError(UserError):
    """The machine lacks what was asked for."""


class WrapError(FsdpBenchError, ValueError):
    """A combination of wrapping options that cannot work, with the reason."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest known word in any case, or an empty string."""
    names = {one.lower(): one for one in known}
    close = difflib.get_close_matches(word.strip().lower()[:LONGEST_VALUE], names, n=1, cutoff=cutoff)
    return f" (did you mean {names[close[0]]!r}?)" if close else ""


def not_allowed(field: str, value: object, allowed: Iterable[str]) -> SpecError:
    """Build the error for a value that is not in ``allowed``, naming the field, the value and the allowed values."""
    names = list(allowed)
    close = nearest(value, names) if isinstance(value, str) else ""
    return SpecError(f"{field}: {shown(value)} is not allowed; one of {', '.join(names)}{close}")


def install_hint(extras: str) -> str:
    """Return the command that installs the packages of extras (``hf``, ``train,hf``): no registry has fsdp-bench."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = [line.partition("; extra == ") for line in requires("fsdp-bench") or ()]
    except PackageNotFoundError:
        lines = []
    needed = {text for text, _, extra in lines if extra.strip("'\"") in extras.split(",")}
    if not needed:
        return f"pip install '.[{extras}]' in the clone of fsdp-bench"
    return f"pip install {' '.join(map(shlex.quote, sorted(needed)))}"


def shown(value: object) -> str:
    """Return a value for messages: its repr on one line. A long one is cut, and its length is appended."""
    try:
        text = printable(repr(value))
    except Exception:  # a number of too many digits, or what a foreign class raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


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


def shortened(text: str, most: int) -> str:
    """Return one printable line of at most so many characters; the middle of a longer one is left out."""
    line = printable(text)
    if len(line) <= most:
        return line
    cut = f" ... ({len(line)} characters) ... "
    kept = most - len(cut)
    return f"{line[: kept * 2 // 3]}{cut}{line[-(kept // 3) :]}"
