"""JSON in and out for the spec types: msgspec, plus the types it does not know."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Precision
from fsdp_bench.spec.text import quoted

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


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
        return Precision.parse(str(value))
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
    """Decode strictly.

    Raises:
        msgspec.DecodeError: for broken JSON (msgspec.ValidationError for JSON of another shape).
    """
    return msgspec.json.decode(data, type=kind, dec_hook=_decode_other)


def to_builtins(value: object) -> Any:
    """Turn a spec value into dictionaries, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=_encode_other)


def from_builtins(value: object, kind: type[T]) -> T:
    """Turn dictionaries, lists, strings and numbers into a spec value, strictly."""
    return msgspec.convert(value, type=kind, dec_hook=_decode_other)


def from_words(fields: dict[str, Any], kind: type[S]) -> S:
    """Turn what a user wrote into a spec type.

    Words are read before msgspec sees them: it knows their vocabulary, but neither the aliases nor the nearest word.

    Raises:
        SpecError: naming the field, the value and what is allowed.
    """
    read = dict(fields)
    for field in msgspec.structs.fields(kind):
        if field.name in read and isinstance(field.type, type) and issubclass(field.type, StrEnum):
            read[field.name] = field.type(read[field.name])
    try:
        return from_builtins(read, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        message, _, path = str(error).partition(" - at `$")
        name = path.strip(".`")
        raise SpecError(
            f"{name}: {quoted(fields[name])} is not allowed: {message}" if name in fields else message
        ) from None


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
