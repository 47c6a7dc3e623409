"""One simulation for many models: sizes are kept as expressions of the model's dimensions.

A search asks for one setup at many widths. What happens in a step is the same at nearly all of them, and only sizes
differ. So a simulation runs on SymInts, which stand for the dimensions: each has a value, and is known to its trace by
how it was computed. Where the simulation decides by a size, the comparison and its outcome are kept as a guard. A model
under which every guard holds goes through the same step, so that its sizes are what the expressions say; for any other
the simulation runs again. Nothing is assumed of how sizes grow. The words are those of
torch.fx.experimental.symbolic_shapes.
"""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from msgspec.structs import asdict, replace

from fsdp_bench.spec.model import ModelShape

T = TypeVar("T")

TRACES = 8
"""Of one question that are kept: dimensions that decide differently; with clipping every depth does."""

Function = Callable[[Any, Any], Any]


def _operation(function: Function) -> Function:
    """Return a method that computes once, and then knows."""

    def apply(self: SymInt, other: int | SymInt) -> Any:
        key = function, other
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self.trace.apply(function, self, other)
        return known

    return apply


def _reflected(function: Function) -> Function:
    """Return the same for a plain number on the left."""
    return lambda self, other: self.trace.apply(function, other, self)


class SymInt:
    """An integer that remembers how it was computed; what is not defined here, no size may be used for."""

    __slots__ = ("known", "place", "trace", "value")

    def __init__(self, trace: Trace[Any], place: int, value: int) -> None:
        self.trace = trace
        self.place = place
        self.value = value
        self.known: dict[tuple[Function, int | SymInt], Any] = {}
        """What was computed from it before: one expression is one object."""

    __add__ = __radd__ = _operation(operator.add)
    __mul__ = __rmul__ = _operation(operator.mul)
    __sub__, __rsub__ = _operation(operator.sub), _reflected(operator.sub)
    __floordiv__, __rfloordiv__ = _operation(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _operation(operator.mod), _reflected(operator.mod)
    __lt__, __le__ = _operation(operator.lt), _operation(operator.le)
    __gt__, __ge__ = _operation(operator.gt), _operation(operator.ge)
    __eq__, __ne__ = _operation(operator.eq), _operation(operator.ne)
    __hash__ = object.__hash__

    def __neg__(self) -> Any:
        return self * -1

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        """Return the value where a plain integer is needed, as in range(): the trace holds for this value alone."""
        assert self == self.value
        return self.value

    def __str__(self) -> str:
        return str(self.value)


_smaller, _larger = _operation(min), _operation(max)


def sym_min(one: int, other: int) -> int:
    """Return the smaller one without deciding which that is."""
    found: int = _smaller(one, other) if isinstance(one, SymInt) else min(one, other)
    return found


def sym_max(one: int, other: int) -> int:
    """Return the larger one without deciding which that is."""
    found: int = _larger(one, other) if isinstance(one, SymInt) else max(one, other)
    return found


class Trace(Generic[T]):
    """What a function of a model's shape returned, and how to find its sizes for another shape."""

    def __init__(self, function: Callable[..., tuple[T, Sequence[int]]], shape: ModelShape, *arguments: Any) -> None:
        self._values: list[int] = []
        """Dimensions and constants at their places; 0 for what is computed."""
        self._constants: dict[int, SymInt] = {}
        self._instructions: list[tuple[Function, int, int, int, bool | None]] = []
        """What is computed from two places and where it is put; of a guard the outcome that it must have."""
        dimensions = {name: SymInt(self, self._place(size), size) for name, size in _dimensions(shape).items()}
        self.result, sizes = function(replace(shape, **dimensions), *arguments)
        self._sizes = [size.place if isinstance(size, SymInt) else self._operand(size).place for size in sizes]
        read = {place for _, *places, _, _ in self._instructions for place in places}.union(self._sizes)
        self._read = [name for name, dimension in dimensions.items() if dimension.place in read]
        self._found: dict[tuple[int, ...], array[int] | None] = {}
        """Sizes by the dimensions that are read; mostly the depth is not."""

    def apply(self, function: Function, left: int | SymInt, right: int | SymInt) -> SymInt | bool:
        """Compute something, and note how."""
        one, other = self._operand(left), self._operand(right)
        value = function(one.value, other.value)
        place, is_guard = self._place(0), isinstance(value, bool)
        self._instructions.append((function, one.place, other.place, place, value if is_guard else None))
        return value if is_guard else SymInt(self, place, value)

    def sizes(self, shape: ModelShape) -> array[int] | None:
        """Return the sizes for a shape; None where it decides differently."""
        dimensions = _dimensions(shape)
        key = tuple(dimensions[name] for name in self._read)
        if key not in self._found:
            self._found[key] = self._evaluate(list(dimensions.values()))
        return self._found[key]

    def _evaluate(self, dimensions: list[int]) -> array[int] | None:
        values = dimensions + self._values[len(dimensions) :]
        for function, left, right, place, outcome in self._instructions:
            value = values[place] = function(values[left], values[right])
            if outcome is not None and value is not outcome:
                return None
        return array("q", map(values.__getitem__, self._sizes))

    def _place(self, value: int) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _operand(self, size: int | SymInt) -> SymInt:
        if isinstance(size, SymInt):
            return size
        known = self._constants.get(size)
        if known is None:
            known = self._constants[size] = SymInt(self, self._place(size), size)
        return known


def traced(
    function: Callable[..., tuple[T, Sequence[int]]], shape: ModelShape, *arguments: Any
) -> tuple[T, Sequence[int]]:
    """Return what a function of a shape and of other arguments returns: a result, and an array of sizes.

    The result may be that for another shape: it must not depend on sizes but through comparisons.
    """
    kept = _traces(function, shape.family, shape.tie_word_embeddings, *arguments)
    for trace in kept:
        sizes = trace.sizes(shape)
        if sizes is not None:
            return trace.result, sizes
    trace = Trace(function, shape, *arguments)
    kept.appendleft(trace)
    sizes = trace.sizes(shape)
    assert sizes is not None
    return trace.result, sizes


@lru_cache(maxsize=16)
def _traces(*question: Any) -> deque[Trace[Any]]:
    """Return the traces of a function with these arguments, the last one first."""
    return deque(maxlen=TRACES)


def _dimensions(shape: ModelShape) -> dict[str, int]:
    return {name: value for name, value in asdict(shape).items() if type(value) is int}
