"""Types that check their values: CaseInsensitiveEnum, and Checked, a struct of typed fields.

A Checked struct reads its fields by their type hints whichever way it is made: by its constructor, by replacing fields,
from a file or from a pickle. Unambiguous values are converted: text (case-insensitive) to an enum, 8.0 and NumPy's 8 to
8, a list to a tuple. Other values are refused; the error names the field, the value and the allowed values. Ranges are
``msgspec.Meta`` in the hints. NaN and infinity are always refused.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, Union

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
Range = tuple[float, float]
"""The smallest and the largest number that are allowed."""

C = TypeVar("C", bound="Checked")


class CaseInsensitiveEnum(StrEnum):
    """An enum of strings, read case-insensitively, with ``-`` or ``_``, with blanks around it, and by aliases."""

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Return the aliases in lower case, each with its member's value."""
        return {}

    @classmethod
    def unsupported(cls) -> dict[str, str]:
        """Return known values (lower case) that are not supported, each with its meaning, for messages."""
        return {}

    @classmethod
    def field(cls) -> str:
        """Return the name of the field that has this type, for messages."""
        return cls.__name__.lower()

    @classmethod
    def _missing_(cls, value: object) -> Any:
        allowed = [*(member.value for member in cls), *cls.aliases()]
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise not_allowed(cls.field(), value, allowed)
        text = value if isinstance(value, str) else shown(value)
        folded = text.strip().lower().replace("_", "-")
        target = cls.aliases().get(folded, folded).lower().replace("_", "-")
        for member in cls:
            if member.value.lower().replace("_", "-") == target:
                return member
        if (meaning := cls.unsupported().get(folded)) is not None:
            raise SpecError(f"{cls.field()}: {shown(value)} ({meaning}) is not supported; one of {', '.join(allowed)}")
        raise not_allowed(cls.field(), value, allowed)


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A struct whose fields are read and checked by their type hints, whichever way it is made.

    Raises:
        SpecError: naming the field, the value and what is allowed.
    """

    def __post_init__(self) -> None:
        kind = type(self)
        fields = _fields.get(kind) or _Fields.of(kind)
        values = fields.values(self)
        if tuple(map(type, values)) not in fields.exact:
            values = fields.read(self)
        for index, (low, high) in fields.ranges:
            value = values[index]
            if value is not None and not low <= value <= high:
                raise fields.out_of_range(index, value)
        self._check()

    def _check(self) -> None:
        """Refuse values that contradict each other. Types and ranges of the fields are checked before."""


class _Fields:
    """The readers of the fields of one Checked type, derived once from its type hints."""

    @staticmethod
    def of(kind: type[Checked]) -> _Fields:
        return _fields.setdefault(kind, _Fields(kind))

    def __init__(self, kind: type[Checked]) -> None:
        hints = typing.get_type_hints(kind, include_extras=True)
        self._names = kind.__struct_fields__
        self._hints = [hints[name] for name in self._names]
        self._readers = [reader_of(hint) for hint in self._hints]
        self._known_by_type = all(_is_known_by_type(hint) for hint in self._hints)
        getter = attrgetter(*self._names)
        self.values: Callable[[Checked], tuple[Any, ...]] = (
            getter if len(self._names) > 1 else lambda struct: (getter(struct),)
        )
        self.exact: set[tuple[type, ...]] = set()
        """Types of field values for which no conversion is needed, only the check of ranges."""
        self.ranges = [(i, found) for i, hint in enumerate(self._hints) if (found := _range_of(hint)) is not None]

    def read(self, struct: Checked) -> tuple[Any, ...]:
        """Read every field, and store converted values in the struct."""
        for name, reader in zip(self._names, self._readers, strict=True):
            value = getattr(struct, name)
            read = reader(value, name)
            if read is not value:
                msgspec.structs.force_setattr(struct, name, read)
        values = self.values(struct)
        if self._known_by_type:
            self.exact.add(tuple(map(type, values)))
        return values

    def out_of_range(self, index: int, value: float) -> SpecError:
        """Build the error for a number outside of its range."""
        return _out_of_range(self._names[index], value, self._hints[index])


_fields: dict[type, _Fields] = {}


def build(kind: type[C], fields: Mapping[str, Any], place: str = "") -> C:
    """Make a Checked struct from a mapping, such as a table of a file. ``place`` is a prefix of field names in errors.

    Raises:
        SpecError: for values that the struct refuses, and for a field that does not exist or is missing.
    """
    known = kind.__struct_fields__
    for name in fields:
        if name not in known:
            hint = nearest(str(name), known) or f"; one of {', '.join(known)}"
            raise SpecError(f"unknown field {shown(f'{place}{name}')}{hint}")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in fields:
            raise SpecError(f"has no `{place}{field.name}`")
    try:
        return kind(**fields)
    except SpecError as error:
        raise SpecError(f"{place}{error}") from None


def read(hint: Any, value: Any, field: str) -> Any:
    """Read one value as a field with this type hint would be read: ``read(Count, 8.0, "nodes")`` is 8.

    Raises:
        SpecError: naming the field, the value and what is allowed.
    """
    return _item_reader(hint)(value, field)


def reader_of(hint: Any) -> Reader:
    """Return the Reader of a type hint.

    Raises:
        TypeError: for a kind of hint that is not supported.
    """
    hint, _ = _bare(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _optional(hint, arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _sequence(_item_reader(arguments[0]))
    if origin is dict:
        return _mapping(_item_reader(arguments[1]))
    if hint in _READERS:
        return _READERS[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value, field: hint(value)
    if isinstance(hint, type):
        return _instance(hint)
    raise TypeError(f"no reader for {hint!r}")


def _bare(hint: Any) -> tuple[Any, Meta | None]:
    """Return a hint without its annotations, and its range."""
    if typing.get_origin(hint) is Annotated:
        bare, *notes = typing.get_args(hint)
        return bare, next((note for note in notes if isinstance(note, Meta)), None)
    return hint, None


def _arms(hint: Any) -> list[Any]:
    """Return the alternatives of a hint without None."""
    bare = _bare(hint)[0]
    if typing.get_origin(bare) in (Union, types.UnionType):
        return [arm for arm in typing.get_args(bare) if arm is not type(None)]
    return [hint]


def _is_known_by_type(hint: Any) -> bool:
    """Return whether a value of the right type needs no further reading. Containers and literals need it."""
    return all(typing.get_origin(_bare(arm)[0]) is None for arm in _arms(hint))


def _range_of(hint: Any) -> Range | None:
    """Return the range of a numeric hint; for floats without one, all finite numbers."""
    for arm in _arms(hint):
        bare, meta = _bare(arm)
        if bare in (int, float):
            most = MOST if bare is int else sys.float_info.max
            low, high = (meta.ge, meta.le) if meta else (None, None)
            if meta is not None and meta.gt is not None:
                low = sys.float_info.min
            return -most if low is None else low, most if high is None else high
    return None


def _out_of_range(field: str, value: float, hint: Any) -> SpecError:
    """Build the error for a number outside of a hint's range."""
    arms = _arms(hint)
    _, meta = _bare(arms[0])
    low, high = _range_of(hint) or (-MOST, MOST)
    if value > high:
        words = f"up to {_short(high)}" if abs(high) < sys.float_info.max else "a finite number"
    elif meta is not None and meta.gt is not None:
        words = "a positive number"
    else:
        words = f"{_short(low)} or more" if abs(low) < sys.float_info.max else "a finite number"
    return SpecError(f"{field}: {shown(value)} is not allowed; {words}{', or leave it out' if arms != [hint] else ''}")


def _short(number: float) -> str:
    return f"{number:.0f}" if number == int(number) and abs(number) < 1e9 else f"{number:g}"


def _item_reader(hint: Any) -> Reader:
    """Return the Reader of the items of a container, which also checks their range."""
    read, allowed = reader_of(hint), _range_of(hint)
    if allowed is None:
        return read
    low, high = allowed

    def read_in_range(value: Any, field: str) -> Any:
        number = read(value, field)
        if number is not None and not low <= number <= high:
            raise _out_of_range(field, number, hint)
        return number

    return read_in_range


def _plain(value: Any) -> Any:
    """Return the Python number of a NumPy or torch scalar; any other value unchanged."""
    if isinstance(value, bool | int | float) and type(value).__module__ == "builtins":
        return value
    if not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):
        return value


def _read_int(value: Any, field: str) -> int:
    number = _plain(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise SpecError(f"{field}: {shown(value)} is not allowed; a whole number")
    return int(number)


def _read_float(value: Any, field: str) -> float:
    number = _plain(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise SpecError(f"{field}: {shown(value)} is not allowed; a number")
    try:
        return float(number)
    except OverflowError:
        raise SpecError(f"{field}: {shown(value)} is not allowed; a smaller number") from None


def _read_bool(value: Any, field: str) -> bool:
    flag = _plain(value)
    if not isinstance(flag, bool):
        raise SpecError(f"{field}: {shown(value)} is not allowed; true or false")
    return flag


def _read_str(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{field}: {shown(value)} is not allowed; a text")
    return value if type(value) is str else str(value)


_READERS: dict[Any, Reader] = {
    int: _read_int,
    float: _read_float,
    bool: _read_bool,
    str: _read_str,
    Any: lambda value, field: value,
    object: lambda value, field: value,
}


def _optional(hint: Any, arguments: tuple[Any, ...]) -> Reader:
    readers = [reader_of(arm) for arm in _arms(hint)]
    if len(readers) != 1 or len(arguments) != 2:
        raise TypeError(f"no reader for {hint!r}")
    (read,) = readers
    return lambda value, field: None if value is None else read(value, field)


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
