"""JSON in and out for the spec types: msgspec, plus the types it does not know."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.spec.checked import Checked, build
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Precision

T = TypeVar("T")
C = TypeVar("C", bound=Checked)


_NOT_PLAIN = re.compile(r"[^\x00-\x7e]")


def _escape(found: re.Match[str]) -> str:
    """Return a character as JSON escapes it: one or two UTF-16 units."""
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def _encode_other(value: object) -> object:
    if isinstance(value, Precision):
        return value.name
    raise NotImplementedError(f"no JSON form for {type(value).__name__}")


def _decode_other(kind: type, value: object) -> object:
    if kind is Precision:
        return Precision.parse(value)  # type: ignore[arg-type]  # which refuses what is no text
    raise NotImplementedError(f"cannot read {kind.__name__}")


def to_json(value: object) -> bytes:
    """Encode as indented JSON in ASCII, as json.dumps does, with a final newline; unknown types are refused.

    Whatever names are in it, every terminal and encoding can show it, and none obeys it.
    """
    data = msgspec.json.format(msgspec.json.encode(value, enc_hook=_encode_other), indent=1) + b"\n"
    if data.isascii() and b"\x7f" not in data:
        return data
    return _NOT_PLAIN.sub(_escape, data.decode()).encode()


def from_json(data: bytes, kind: type[T]) -> T:
    """Decode JSON; a Checked type reads words in any case and whole numbers as its constructor does.

    Raises:
        msgspec.DecodeError: for broken JSON (msgspec.ValidationError for JSON of another shape).
    """
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_decode_other)
    except msgspec.ValidationError as error:
        return _read_otherwise(msgspec.json.decode(data), kind, error)


def to_builtins(value: object) -> Any:
    """Turn a spec value into dictionaries, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=_encode_other)


def from_builtins(value: object, kind: type[T]) -> T:
    """Turn dictionaries, lists, strings and numbers into a spec value, as ``from_json``.

    Raises:
        msgspec.ValidationError: for values of another shape; caused by a SpecError where the type is Checked.
    """
    try:
        return msgspec.convert(value, type=kind, dec_hook=_decode_other)
    except msgspec.ValidationError as error:
        return _read_otherwise(value, kind, error)


def _read_otherwise(value: object, kind: type[T], error: msgspec.ValidationError) -> T:
    """Read what msgspec refused as the constructor of a Checked type would, which knows more spellings and says more.

    Raises:
        msgspec.ValidationError: caused by the constructor's SpecError; for other types the one that there was.
    """
    if not (isinstance(kind, type) and issubclass(kind, Checked) and isinstance(value, dict)):
        raise error from error.__cause__
    try:
        return build(kind, value)
    except SpecError as reason:
        raise msgspec.ValidationError(str(reason)) from reason


def from_words(fields: dict[str, Any], kind: type[C]) -> C:
    """Turn what a user wrote into a spec type.

    Raises:
        SpecError: naming the field, the value and what is allowed.
    """
    return build(kind, fields)


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary name beside ``path``, flush it to the disk, rename: readers see all of it or nothing.

    Raises:
        OSError: when the folder cannot be written or is full; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
