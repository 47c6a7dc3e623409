"""Reads TOML and JSON files that a user wrote or downloaded: whatever is wrong with one is a line that names it."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_bench.spec.errors import SpecError, shown

DEEPEST = 32
"""Levels of tables and lists within each other; no file of ours needs more than four."""
LARGEST_INTEGER = 2**63 - 1

_PARSERS: dict[str, Callable[[str], Any]] = {"TOML": tomllib.loads, "JSON": json.loads}


def read_document(path: Path, form: str) -> Any:
    """Read a file of ``TOML`` or ``JSON``.

    Raises:
        SpecError: as ``read_text`` and ``parse``.
    """
    return parse(read_text(path, form), form, path)


def read_text(path: Path, form: str) -> str:
    """Read the text of a file that should be of that form.

    Raises:
        SpecError: naming the file, when it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not {form}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def parse(text: str, form: str, path: Path) -> Any:
    """Parse the text of a file.

    Raises:
        SpecError: naming the file, when it is not of that form, is nested too deeply, or holds a number that is not
            finite or does not fit into 64 bits.
    """
    try:
        document = _PARSERS[form](text)
        _check(document, "", 0)
    except RecursionError:
        raise SpecError(f"{path}: is nested too deeply; up to {DEEPEST} levels") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: is not {form}: {error}") from None
    except ValueError:  # of int(), for an integer of more than 4300 digits
        raise SpecError(f"{path}: holds a number that is too large; up to {LARGEST_INTEGER}") from None
    return document


def _check(value: Any, place: str, depth: int) -> None:
    """Refuse deep nesting and impossible numbers.

    Raises:
        SpecError: naming the place, ``run.timeout_seconds``.
    """
    if depth > DEEPEST:
        raise SpecError(f"is nested too deeply; up to {DEEPEST} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check(inner, f"{place}.{key}" if place else key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, place, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{place}: {value} is not allowed; a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise SpecError(f"{place}: {shown(value)} is not allowed; up to {LARGEST_INTEGER}")
