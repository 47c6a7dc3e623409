"""Difference: a number of A and of B. Differences are B less A."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class FieldDifference:
    """A field of the setup, or another condition, that differs. None is what is not known."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Difference:
    """A number of both sides."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """The amount by which B exceeds A."""
        return self.b - self.a


D = TypeVar("D", bound=Difference)


def differences(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[Difference, ...]:
    """Return the differences of two sums by part, the largest first; a part that only one has is 0 in the other."""
    return largest_first(Difference(name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys((*a, *b)))


def largest_first(differences: Iterable[D]) -> tuple[D, ...]:
    """Return differences in the order of their size."""
    return tuple(sorted(differences, key=lambda one: (-abs(one.difference), one.name)))


def in_bytes(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """Return the JSON form of sizes."""
    return [{"name": one.name, **numbers(one, "_bytes")} for one in differences]


def in_seconds(differences: Iterable[Difference]) -> list[dict[str, Any]]:
    """Return the JSON form of times."""
    return [{"name": one.name.removesuffix("_seconds"), **numbers(one, "_seconds")} for one in differences]


def numbers(one: Difference, unit: str) -> dict[str, float]:
    """Return the JSON form of one difference, whose keys end with a unit."""
    return {f"a{unit}": one.a, f"b{unit}": one.b, f"difference{unit}": one.difference}
