"""Finds the formulas of sizes that hold in the same recording at several points.

A point gives every symbol a value. The values are unlike each other, so that hardly two formulas agree at all points;
the last point is never used to find a formula, only to check it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from typing import Any

import msgspec
import torch

from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.lora import SCALED_TOGETHER
from fsdp_bench.spec.recording.formula import Product, factor_value, multiply, parse, to_text

Point = Mapping[str, int]
"""The values of the symbols of sizes: ``B``, ``S``, ..."""
Values = tuple[int, ...]

_MULTIPLES = (8, 16, 32, 64, 128)
_LARGEST_COEFFICIENT = 64
_LONGEST_PRODUCT = 3


class Formulas:
    """The formulas of the sizes of one recording."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        self.texts: list[str] = []
        """Every formula that was found, once."""
        self._numbers: dict[str, int] = {}
        self._known: dict[Values, str] = {}
        symbols = sorted({symbol for point in points for symbol in point})
        self._changing = [s for s in symbols if len({point[s] for point in points}) > 1]
        self._monomials = self._tables()

    def number(self, sizes: Sequence[int]) -> int:
        """Return the number of the formula of one size, given its value at each point."""
        text = self.text(sizes)
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]

    def text(self, sizes: Sequence[int]) -> str:
        """Return the formula of a size, given at each point. Raises SpecError if none is found: it depends on data."""
        values = tuple(int(size) for size in sizes)
        terms = [size.terms if isinstance(size, Size) else ((int(size),),) for size in sizes]
        if all([len(t) for t in one] == [len(t) for t in terms[0]] for one in terms):
            columns = [list(zip(*factors, strict=True)) for factors in zip(*terms, strict=True)]
            parts = [multiply([self._of(column) for column in factors]) for factors in columns]
            return to_text([product for part in parts for product in parse(part)])
        return self._of(values)

    def _of(self, values: Values) -> str:
        if values not in self._known:
            self._known[values] = to_text(self._find(values))
        return self._known[values]

    def _find(self, values: Values) -> list[Product]:
        if len(set(values)) == 1:
            return [(Fraction(values[0]), ())]
        for factors, at in self._monomials:
            ratio = Fraction(values[0], at[0])
            if _is_simple(ratio) and all(value == ratio * there for value, there in zip(values, at, strict=True)):
                return [(ratio, factors)]
        for one, other in self._pairs():
            found = _two(values, one[1], other[1])
            if found is not None:
                return [(found[0], one[0]), (found[1], other[0])]
        known = ", ".join(self._changing)
        raise SpecError(
            f"a size is {', '.join(map(str, values))} at the points of the recording: no formula of {known}"
        )

    def _tables(self) -> list[tuple[tuple[str, ...], Values]]:
        """Return the products of symbols, simple ones first, with their values at all points."""
        symbols = self._changing
        factors = [*symbols, *(f"up({symbol},{k})" for symbol in symbols for k in _MULTIPLES)]
        found = []
        for length in range(1, _LONGEST_PRODUCT + 1):
            of = factors if length == 1 else symbols
            for chosen in combinations_with_replacement(of, length):
                at = (math.prod(factor_value(factor, point) for factor in chosen) for point in self.points)
                found.append((chosen, tuple(at)))
        return found

    def _pairs(self) -> Iterator[tuple[tuple[tuple[str, ...], Values], tuple[tuple[str, ...], Values]]]:
        """Yield what two terms may be: a product and a constant, then two products of at most two symbols."""
        one = ((), (1,) * len(self.points))
        short = [entry for entry in self._monomials if len(entry[0]) <= 2]
        for entry in short:
            yield entry, one
        yield from combinations([entry for entry in short if not any("up(" in factor for factor in entry[0])], 2)


def _two(values: Values, one: Values, other: Values) -> tuple[Fraction, Fraction] | None:
    """Return the coefficients with which two terms add up to the values at all points; None if there are none."""
    for last in range(1, len(values)):
        determinant = one[0] * other[last] - one[last] * other[0]
        if determinant:
            a = Fraction(values[0] * other[last] - values[last] * other[0], determinant)
            b = Fraction(one[0] * values[last] - one[last] * values[0], determinant)
            if not (_is_simple(a) and _is_simple(b)):
                return None
            holds = all(a * x + b * y == value for value, x, y in zip(values, one, other, strict=True))
            return (a, b) if holds else None
    return None


def _is_simple(number: Fraction) -> bool:
    return number.denominator in (*range(_LARGEST_COEFFICIENT + 1), SCALED_TOGETHER) and number.numerator != 0


def merged(recordings: list[Any], formulas: Formulas, where: str = "") -> Any:
    """Return one recording: what is equal at all points, and the number of a formula for each size.

    Raises SpecError where the recordings differ in more than sizes: the code depends on data or on the sizes.
    """
    first = recordings[0]
    if isinstance(first, Size):
        return formulas.number(recordings)
    if isinstance(first, msgspec.Struct):
        return type(first)(*merged([msgspec.structs.astuple(each) for each in recordings], formulas, where))
    if isinstance(first, list | tuple):
        if any(len(other) != len(first) for other in recordings):
            raise SpecError(_differs(where, recordings))
        inner = f"{where} {first[1]}" if len(first) == 6 and first[0] == "c" else where
        return [merged([other[index] for other in recordings], formulas, inner) for index in range(len(first))]
    if isinstance(first, dict):
        if any(other.keys() != first.keys() for other in recordings):
            raise SpecError(_differs(where, recordings))
        return {key: merged([other[key] for other in recordings], formulas, where) for key in first}
    if any(other != first for other in recordings):
        raise SpecError(_differs(where, recordings))
    return first


def _differs(where: str, recordings: list[Any]) -> str:
    shown = " / ".join(str(recording)[:60] for recording in recordings[:2])
    place = where.split()[-1] if where.strip() else "the model"
    return (
        f"{place}: its code runs other operators at other sizes, or ones that depend on data; where it loops over the"
        f" sequence, --fixed-length records it for one length ({shown})"
    )


class Size(int):
    """A size. Recordings at several points tell which formula each factor follows."""

    terms: tuple[tuple[int, ...], ...]
    """The factors of each product."""

    @classmethod
    def sum_of(cls, terms: Iterable[Iterable[int]]) -> "Size":
        """Return a sum of products."""
        plain = tuple(tuple(int(factor) for factor in term) for term in terms)
        made = cls(sum(math.prod(term) for term in plain))
        made.terms = plain
        return made

    @classmethod
    def product(cls, *factors: int) -> "Size":
        """Return a product."""
        return cls.sum_of([factors])

    @classmethod
    def of_storage(cls, tensor: torch.Tensor) -> "Size":
        """Return the bytes of a tensor's storage; as its shape where it fills the storage."""
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes == tensor.numel() * tensor.element_size():
            return cls.product(*tensor.shape, tensor.element_size())
        return cls.product(num_bytes)
