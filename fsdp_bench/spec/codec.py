"""JSON in and out for the spec types, by msgspec."""

import math
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.spec.checked import Checked, build
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.setup import Precision
from fsdp_bench.spec.units import LARGEST

T = TypeVar("T")


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
    parse = getattr(kind, "parse", None)
    if parse is not None:
        return parse(value)
    raise NotImplementedError(f"cannot read {kind.__name__}")


def to_json(value: object) -> bytes:
    """Encode as indented ASCII JSON, as json.dumps does, with a final newline. Unknown types are refused.

    ASCII is safe on every terminal, whatever names the value contains. Values that JSON or UTF-8 cannot represent are
    written as text: NaN and infinity as ``"nan"``, ``"inf"`` and ``"-inf"``; lone surrogates as their escapes.
    """
    data = msgspec.json.format(msgspec.json.encode(_writable(to_builtins(value))), indent=1) + b"\n"
    if data.isascii() and b"\x7f" not in data:
        return data
    return _NOT_PLAIN.sub(_escape, data.decode()).encode()


def from_json(data: bytes, kind: type[T]) -> T:
    """Decode JSON; Checked types convert values. Raises msgspec.DecodeError, or ValidationError for another shape."""
    return from_builtins(decode(data), kind)


def from_file(path: Path, kind: type[T]) -> T | None:
    """Decode a file of JSON; None if it cannot be read, or is not whole."""
    try:
        return from_json(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return None


def decode(data: bytes) -> Any:
    """Decode JSON to dictionaries, lists, strings and numbers. Raises msgspec.DecodeError."""
    try:
        value = msgspec.json.decode(data)
        if _MANY_DIGITS.search(data):
            _refuse_huge_integers(value)
    except (RecursionError, ValueError) as error:  # bytes that are not UTF-8 are a ValueError
        raise msgspec.DecodeError(_reason(error)) from None
    return value


_MANY_DIGITS = re.compile(rb"\d{19}")


def _refuse_huge_integers(value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise msgspec.DecodeError("holds an integer of more than 63 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_huge_integers(item)


def to_builtins(value: object) -> Any:
    """Turn a spec value into dictionaries, lists, strings and numbers."""
    return msgspec.to_builtins(value, enc_hook=_encode_other)


def from_builtins(value: object, kind: type[T]) -> T:
    """Turn dictionaries, lists, strings and numbers into a spec value, as ``from_json`` does.

    Raises:
        msgspec.ValidationError: for values of another shape; caused by a SpecError if the type is Checked.
    """
    try:
        return msgspec.convert(value, type=kind, dec_hook=_decode_other)
    except msgspec.ValidationError as error:
        return _read_otherwise(value, kind, error)
    except (RecursionError, ArithmeticError, LookupError, AttributeError) as error:
        # A type's own check met a number or a word that it did not expect.
        raise msgspec.ValidationError(_reason(error)) from error


def _read_otherwise(value: object, kind: type[T], error: msgspec.ValidationError) -> T:
    """Read a value that msgspec refused with the constructor of a Checked type, which converts more.

    Raises:
        msgspec.ValidationError: caused by the constructor's SpecError; for other types, msgspec's own error.
    """
    if not (isinstance(kind, type) and issubclass(kind, Checked) and isinstance(value, dict)):
        raise error from error.__cause__
    try:
        return build(kind, value)
    except SpecError as reason:
        raise msgspec.ValidationError(str(reason)) from reason


def from_versioned(data: bytes, kind: type[T], name: str, newest: int, instead: str = "") -> T:
    """Decode a stored document that has a ``schema_version`` of at most ``newest``.

    Raises msgspec.DecodeError for what is no whole document; SpecError, with the file's ``name`` and the way out
    ``instead``, for a newer one.
    """
    raw = decode(data)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise msgspec.ValidationError(f"{name} has no schema_version")
    if version > newest:
        raise SpecError(
            f"{name}: schema_version {version} was written by a newer fsdp-bench; this one reads up to {newest}."
            f" Upgrade fsdp-bench{instead}"
        )
    if version < 1:
        raise msgspec.ValidationError(f"{name}: schema_version {version} never existed")
    return from_builtins(raw, kind)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error) or type(error).__name__


def _writable(value: Any) -> Any:
    """Replace values that JSON or UTF-8 cannot represent by text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value
