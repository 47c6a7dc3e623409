"""Checks of keys and values in a sweep file, with errors that name the place."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fsdp_bench.spec.checked import Checked, build
from fsdp_bench.spec.errors import SpecError, SweepFileError, nearest, shown
from fsdp_bench.spec.setup import FIELDS

FIELD_ALIASES = {one.word: name for name, one in FIELDS.items() if one.word != name}
"""Short names of fields, as on the command line."""

T = TypeVar("T", bound=Checked)


def check_keys(place: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse a key that does not exist."""
    for key in table:
        if key not in known:
            hint = nearest(key, known) or f"; one of {', '.join(known)}"
            raise SpecError(f"{place}unknown key {shown(key)}{hint}")


def convert(fields: dict[str, Any], kind: type[T], place: str) -> T:
    """Turn a table of the file into a spec type."""
    try:
        return build(kind, fields)
    except SpecError as error:
        raise SpecError(f"{place} {error}".strip()) from None


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return the value, which must be one of ``allowed``."""
    if value not in allowed:
        raise SpecError(f"{field}: {shown(value)} is not allowed; one of {', '.join(allowed)}")
    return str(value)


def check_folder_name(name: str, where: str) -> None:
    """Refuse a name that cannot be the name of one folder, such as ``../x``."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise SpecError(
            f"{where}: {name!r} is not allowed; up to 100 letters, digits, '.', '_' and '-', for a folder's name"
        )


def table(document: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a table of the file; an empty one if it is missing."""
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def tables(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a list of tables of the file; an empty one if it is missing."""
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SpecError(f"{key}: must be a list of tables, each written [[{key}]]")
    return value


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before an error's message."""
    try:
        yield
    except SpecError as error:
        raise SweepFileError(f"{path}: {error}") from None
