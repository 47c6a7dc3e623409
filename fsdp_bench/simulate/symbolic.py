"""One simulation for many models: sizes are kept as expressions of the model's dimensions.

A search asks for one setup at many widths. What happens in a step is the same at nearly all of them, and only sizes
differ. So a simulation runs on SymInts, which stand for the dimensions: each has a value, and is known to its trace by
how it was computed. Where the simulation decides by a size, the comparison and its outcome are kept as a guard. A model
under which every guard holds goes through the same step, so that its sizes are what the expressions say; for any other
the simulation runs again. Nothing is assumed of how sizes grow. The words are those of
torch.fx.experimental.symbolic_shapes.
"""

from __future__ import annotations

import copy
import operator
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from msgspec.structs import asdict, force_setattr

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
            known = self.known[key] = self.expressions.apply(function, self, other)
        return known

    return apply


def _reflected(function: Function) -> Function:
    """Return the same for a plain number on the left."""
    return lambda self, other: self.expressions.apply(function, other, self)


class SymInt:
    """An integer that remembers how it was computed; what is not defined here, no size may be used for."""

    __slots__ = ("expressions", "known", "place", "value")

    def __init__(self, expressions: Expressions, place: int, value: int) -> None:
        self.expressions = expressions
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
        self.expressions.apply(operator.eq, self, self.value)
        return self.value

    def __str__(self) -> str:
        return str(self.value)


_smaller, _larger = _operation(min), _operation(max)


def sym_min(one: int, other: int) -> int:
    """Return the smaller one without deciding which that is."""
    if not isinstance(one, SymInt):
        one, other = other, one
    found: int = _smaller(one, other) if isinstance(one, SymInt) else min(one, other)
    return found


def sym_max(one: int, other: int) -> int:
    """Return the larger one without deciding which that is."""
    if not isinstance(one, SymInt):
        one, other = other, one
    found: int = _larger(one, other) if isinstance(one, SymInt) else max(one, other)
    return found


class Expressions:
    """What was computed from a model's dimensions, in the order in which it was."""

    def __init__(self, dimensions: Sequence[int]) -> None:
        self._values: list[int] = []
        """Dimensions and constants at their places; 0 for what is computed."""
        self._constants: dict[int, SymInt] = {}
        self.instructions: list[tuple[Function, int, int, int, bool | None]] = []
        """What is computed from two places and where it is put; of a guard the outcome that it must have."""
        self.dimensions = [self._new(size) for size in dimensions]

    def apply(self, function: Function, left: int | SymInt, right: int | SymInt) -> SymInt | bool:
        """Compute something, and note how."""
        one, other = self.of(left), self.of(right)
        value = function(one.value, other.value)
        found, is_guard = self._new(value), isinstance(value, bool)
        self.instructions.append((function, one.place, other.place, found.place, value if is_guard else None))
        return value if is_guard else found

    def of(self, size: int | SymInt) -> SymInt:
        """Return a constant as an expression."""
        if isinstance(size, SymInt):
            return size
        if size not in self._constants:
            self._constants[size] = self._new(size)
        return self._constants[size]

    def end(self, places: Sequence[int]) -> None:
        """Keep what these places and the guards need, such as no bytes that only a timeline would read.

        Objects that name this one are forgotten, so that all are gone when the last is: cycles are costly to collect.
        """
        needed, kept = set(places), []
        for instruction in reversed(self.instructions):
            _, left, right, place, outcome = instruction
            if outcome is not None or place in needed:
                needed.update((left, right))
                kept.append(instruction)
        self.instructions = kept[::-1]
        self._constants.clear()
        self.dimensions.clear()

    def values(self, dimensions: Sequence[int]) -> list[int] | None:
        """Return what is at every place for other dimensions; None where a guard does not hold."""
        values = [*dimensions, *self._values[len(dimensions) :]]
        for function, left, right, place, outcome in self.instructions:
            value = values[place] = function(values[left], values[right])
            if outcome is not None and value is not outcome:
                return None
        return values

    def _new(self, value: int) -> SymInt:
        self._values.append(value)
        return SymInt(self, len(self._values) - 1, value)


class Trace(Generic[T]):
    """What a function of a model's shape returned, and how to find its sizes for another shape."""

    def __init__(self, function: Callable[..., tuple[T, Sequence[int]]], shape: ModelShape, *arguments: Any) -> None:
        sizes_of = _dimensions(shape)
        self._expressions = expressions = Expressions(list(sizes_of.values()))
        symbolic = dict(zip(sizes_of, expressions.dimensions, strict=True))
        self.result, sizes = function(_with_symbols(shape, symbolic), *arguments)
        self._places = [(size if isinstance(size, SymInt) else expressions.of(size)).place for size in sizes]
        expressions.end(self._places)
        read = {place for _, *places, _, _ in expressions.instructions for place in places}.union(self._places)
        self._read = [name for place, name in enumerate(sizes_of) if place in read]
        self._found: dict[tuple[int, ...], array[int] | None] = {}
        """Sizes by the dimensions that are read; mostly the depth is not."""

    def sizes(self, shape: ModelShape) -> array[int] | None:
        """Return the sizes for a shape; None where it decides differently."""
        dimensions = _dimensions(shape)
        key = tuple(dimensions[name] for name in self._read)
        if key not in self._found:
            values = self._expressions.values(list(dimensions.values()))
            self._found[key] = None if values is None else array("q", [values[place] for place in self._places])
        return self._found[key]


def traced(
    function: Callable[..., tuple[T, Sequence[int]]], shape: ModelShape, *arguments: Any, others_follow: bool = True
) -> tuple[T, Sequence[int]]:
    """Return what a function of a shape and of other arguments returns: a result, and sizes.

    The result may be that for another shape: it must not depend on sizes but through comparisons. Tracing takes half as
    long again as the function; where no other shapes follow there is none, but a trace that is kept is used.
    """
    kept = _traces(function, shape.family, shape.tie_word_embeddings, *arguments)
    for trace in tuple(kept):
        sizes = trace.sizes(shape)
        if sizes is not None:
            return trace.result, sizes
    if not others_follow:
        return function(shape, *arguments)
    trace = Trace(function, shape, *arguments)
    kept.appendleft(trace)
    sizes = trace.sizes(shape)
    assert sizes is not None
    return trace.result, sizes


@lru_cache(maxsize=16)
def _traces(*question: Any) -> deque[Trace[Any]]:
    """Return the traces of a function with these arguments, the last one first."""
    return deque(maxlen=TRACES)


def _with_symbols(shape: ModelShape, symbolic: dict[str, SymInt]) -> ModelShape:
    """Return a copy whose dimensions are symbols, which a ModelShape's own check would refuse as no whole numbers."""
    symbolic_shape = copy.copy(shape)
    for name, symbol in symbolic.items():
        force_setattr(symbolic_shape, name, symbol)
    return symbolic_shape


def _dimensions(shape: ModelShape) -> dict[str, int]:
    return {name: value for name, value in asdict(shape).items() if type(value) is int}
