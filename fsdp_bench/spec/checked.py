"""Types that check their values: CaseInsensitiveEnum, and Checked, a struct of typed fields.

A Checked struct reads its fields by their type hints whichever way it is made: by its constructor, by replacing fields,
from a file or from a pickle. Unambiguous values are converted: text (case-insensitive) to an enum, 8.0 and NumPy's 8 to
8, a list to a tuple. Other values are refused; the error names the field, the value and the allowed values. Ranges are
``msgspec.Meta`` in the hints. NaN and infinity are always refused.
"""

import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

import msgspec
from msgspec import Meta

from fsdp_bench.spec.errors import SpecError, nearest, not_allowed, shown

MOST = 2**62
"""The largest integer that is allowed anywhere. No count comes near it, and files store 64 bits."""

Count = Annotated[int, Meta(ge=1, le=MOST)]
"""An integer, 1 or more."""
Positive = Annotated[float, Meta(gt=0)]
"""A positive number."""
Rate = Annotated[float, Meta(ge=1e6, le=1e21)]
"""FLOPs or bytes per second of a device or link. A number that was meant in TFLOP/s or GB/s is too small."""

Reader = Callable[[Any, str], Any]
"""Takes a value and the name of its field; returns the value to store, or raises SpecError."""

C = TypeVar("C", bound="Checked")


class CaseInsensitiveEnum(StrEnum):
    """An enum of strings, read case-insensitively, with ``-`` or ``_``, with blanks around it, and by aliases."""

    aliases: ClassVar[Mapping[str, str]]
    """In lower case, each with its member's value."""
    _field: ClassVar[str]

    def __init_subclass__(cls, field: str = "", aliases: Mapping[str, str] = {}) -> None:
        """Note the aliases, and the name of the field that has this type, for messages: by default the class's."""
        cls._field, cls.aliases = field or cls.__name__.lower(), aliases

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str | int) and not isinstance(value, bool):
            folded = (value if isinstance(value, str) else shown(value)).strip().lower().replace("_", "-")
            target = cls.aliases.get(folded, folded).lower().replace("_", "-")
            for member in cls:
                if member.value.lower().replace("_", "-") == target:
                    return member
        raise not_allowed(cls._field, value, [*(member.value for member in cls), *cls.aliases])


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A struct whose fields are read by their type hints however it is made. Raises SpecError for what they refuse."""

    def __post_init__(self) -> None:
        for name, read_field in _readers(type(self)):
            value = getattr(self, name)
            found = read_field(value, name)
            if found is not value:
                msgspec.structs.force_setattr(self, name, found)
        self._check()

    def _check(self) -> None:
        """Refuse values that contradict each other. Types and ranges of the fields are checked before."""


@cache
def _readers(kind: type[Checked]) -> tuple[tuple[str, Reader], ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple((name, _reader(hints[name])) for name in kind.__struct_fields__)


def build(kind: type[C], fields: Mapping[str, Any], place: str = "") -> C:
    """Make a Checked struct from a mapping; ``place`` begins names in errors. Raises SpecError as the struct."""
    known = kind.__struct_fields__
    for name in fields:
        if name not in known:
            hint = nearest(str(name), known) or f"; one of {', '.join(known)}"
            raise SpecError(f"unknown field {shown(f'{place}{name}')}{hint}")
    for name in _required(kind):
        if name not in fields:
            raise SpecError(f"has no `{place}{name}`")
    try:
        return kind(**fields)
    except SpecError as error:
        raise SpecError(f"{place}{error}") from None


@cache
def _required(kind: type[Checked]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.required)


def read(hint: Any, value: Any, field: str) -> Any:
    """Read one value as a field of this type: ``read(Count, 8.0, "nodes")`` is 8. Raises SpecError if it is refused."""
    return _reader(hint)(value, field)


def _reader(hint: Any, is_optional: bool = False) -> Reader:
    """Return the Reader of a type hint; of an optional one's type, whose messages say that it can be left out."""
    bare, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    origin, arguments = typing.get_origin(bare), typing.get_args(bare)
    if origin in (Union, types.UnionType):
        (arm,) = (arm for arm in arguments if arm is not type(None))
        read_arm = _reader(arm, is_optional=True)
        return lambda value, field: None if value is None else read_arm(value, field)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _sequence(_reader(arguments[0]))
    if origin is dict:
        return _mapping(_reader(arguments[1]))
    if bare in (int, float):
        return _number(bare, next((note for note in notes if isinstance(note, Meta)), Meta()), is_optional)
    if bare in (Any, object):
        return lambda value, field: value
    if issubclass(bare, Enum):
        return lambda value, field: value if type(value) is bare else bare(value)
    return {bool: _read_bool, str: _read_str}.get(bare) or _instance(bare)


def _number(kind: type[int | float], meta: Meta, is_optional: bool) -> Reader:
    """Read numbers in a range; without one all finite floats, or integers up to MOST."""
    most = MOST if kind is int else sys.float_info.max
    is_positive = meta.gt is not None
    low = sys.float_info.min if is_positive else -most if meta.ge is None else meta.ge
    high = most if meta.le is None else meta.le
    convert = _int if kind is int else _float

    def read(value: Any, field: str) -> int | float:
        number = value if type(value) is kind else convert(value, field)
        if low <= number <= high:
            return number
        words = "a finite number"
        if number > high:
            words = f"up to {_short(high)}" if high < sys.float_info.max else words
        elif is_positive:
            words = "a positive number"
        elif low > -sys.float_info.max:
            words = f"{_short(low)} or more"
        raise SpecError(f"{field}: {shown(number)} is not allowed; {words}{', or leave it out' if is_optional else ''}")

    return read


def _short(number: float) -> str:
    return f"{number:.0f}" if number == int(number) and abs(number) < 1e9 else f"{number:g}"


def _plain(value: Any) -> Any:
    """Return the Python number of a NumPy or torch scalar; any other value unchanged."""
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return value.item()
    return value


def _int(value: Any, field: str) -> int:
    number = _plain(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise SpecError(f"{field}: {shown(value)} is not allowed; a whole number")
    return int(number)


def _float(value: Any, field: str) -> float:
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise SpecError(f"{field}: {shown(value)} is not allowed; a number")
    try:
        return float(number)
    except OverflowError:
        raise SpecError(f"{field}: {shown(value)} is not allowed; a smaller number") from None


def _read_bool(value: Any, field: str) -> bool:
    flag = value if type(value) is bool else _plain(value)
    if not isinstance(flag, bool):
        raise SpecError(f"{field}: {shown(value)} is not allowed; true or false")
    return flag


def _read_str(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{field}: {shown(value)} is not allowed; a text")
    return value if type(value) is str else str(value)


def _literal(allowed: tuple[Any, ...]) -> Reader:
    def read(value: Any, field: str) -> Any:
        folded = value.strip().lower() if isinstance(value, str) else value
        for member in allowed:
            if type(folded) is type(member) and folded == member:
                return member
        raise not_allowed(field, value, [str(member) for member in allowed])

    return read


def _sequence(read_item: Reader) -> Reader:
    def read(value: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise SpecError(f"{field}: {shown(value)} is not allowed; a list")
        items = tuple(read_item(item, f"{field}[{index}]") for index, item in enumerate(value))
        same = isinstance(value, tuple) and all(old is new for old, new in zip(value, items, strict=True))
        return value if same else items  # type: ignore[return-value]  # a tuple, when it is the same

    return read


def _mapping(read_item: Reader) -> Reader:
    def read(value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise SpecError(f"{field}: {shown(value)} is not allowed; a table")
        return {_read_str(key, field): read_item(item, f"{field}.{key}") for key, item in value.items()}

    return read


def _instance(kind: type) -> Reader:
    """Read an instance; a struct also from a mapping, and a type with ``parse`` also from text."""
    parse = getattr(kind, "parse", None)

    def read(value: Any, field: str) -> Any:
        if isinstance(value, kind):
            return value
        if issubclass(kind, Checked) and isinstance(value, Mapping):
            return build(kind, value, f"{field}.")
        if parse is not None:
            return parse(value)
        raise SpecError(f"{field}: {shown(value)} is not allowed; a {kind.__name__}")

    return read
