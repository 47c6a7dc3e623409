"""Merges what Inductor wrote at several sizes into one recording: every number becomes a formula.

A buffer's bytes are a product of sizes, so that each number is a constant times a product of symbols. The formula that
holds at all sizes is searched.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import chain, product
from math import prod
from typing import Any

from fsdp_bench.spec.recording.compiled import CompiledCode, Step, Tuning
from fsdp_bench.spec.recording.formula import Product, parse, to_text
from fsdp_bench.spec.recording.steps import Allocation, Drop, Operator
from tools.compiled.wrapper_code import Compiled, Dropped, Function, Run, UnknownCode

Sizes = dict[str, int]

_HIGHEST = {"num_attention_heads": 2, "head_dim": 2}
ENOUGH_POINTS = 3
"""After so many that are alike no further size is compiled."""
ENOUGH_FLOAT8_POINTS = 2
"""The same in float8, where a number is a multiple of few products."""
FEWEST_POINTS = 2
"""For one point, several products of symbols may be right: then those of the block's other recordings are taken."""


def most_common(points: Sequence[tuple[Sizes, Compiled]], with_in_place: bool = False) -> list[tuple[Sizes, Compiled]]:
    """Return the points at which Inductor wrote the same, as most points have it.

    A tensor that a kernel changes in place counts as two, one read and one written, unless ``with_in_place``.
    """
    shapes = [_without_numbers(compiled, with_in_place) for _, compiled in points]
    usual, _ = Counter(shapes).most_common(1)[0]
    return [point for point, shape in zip(points, shapes, strict=True) if shape == usual]


_WIDTH, _KV_WIDTH, _INNER = ("hidden_size",), ("head_dim", "num_key_value_heads"), ("intermediate_size",)
_TOKENS = ("B", "S")
FLOAT8_PRODUCTS = (
    *((), ("B",), ("S",), ("num_attention_heads",), ("num_key_value_heads",), ("head_dim",)),
    *(_WIDTH, _KV_WIDTH, _INNER, _TOKENS, ("S", "head_dim"), (*_TOKENS, "num_attention_heads")),
    *((*_TOKENS, *_WIDTH), (*_TOKENS, *_KV_WIDTH), (*_TOKENS, *_INNER)),
    *((*_WIDTH, *_WIDTH), (*_WIDTH, *_KV_WIDTH), (*_WIDTH, *_INNER)),
    *((*_WIDTH, name) for name in ("parts_x", "parts_both", "parts_x_x", "parts_kv_x", "parts_f_x")),
    *((*_KV_WIDTH, "parts_kv"), (*_INNER, "parts_f"), (*_INNER, "parts_x_f")),
    *((f"parts_max_{name}",) for name in ("x", "kv", "f", "x_x", "kv_x", "f_x")),
)
"""The factors of numbers in the benchmark Llama's blocks in float8: activations, weights, rows and columns of
these, and the parts of their sums and maxima."""


def merge(
    points: Sequence[tuple[Sizes, Compiled]],
    others: Iterable[CompiledCode] = (),
    products: Sequence[tuple[str, ...]] = (),
) -> CompiledCode:
    """Return one recording of the same code at several sizes.

    ``points`` are the sizes, and what Inductor wrote at each; ``others`` are recordings of the same block, whose
    formulas are taken where there is one size. ``products`` say what numbers are multiples of, by default of any
    product of symbols: so few that one size is enough. The sizes of what backward takes are then recorded, too.

    Raises UnknownCode for a number that is no product of the symbols.
    """
    return _Merged(points, others, products).code()


def _without_numbers(compiled: Compiled, with_in_place: bool) -> str:
    def plain(function: Function) -> list[Any]:
        return [function.num_inputs, [_plain(step, with_in_place) for step in function.steps], function.returns]

    return repr((compiled.inputs, plain(compiled.forward), plain(compiled.backward)))


def _plain(step: Run | Dropped, with_in_place: bool) -> Any:
    if isinstance(step, Dropped):
        return step
    name = "triton" if step.name.startswith("triton_") else step.name  # named for what happens to be fused
    moved = step.changed if with_in_place else (), len(step.touched_bytes) + len(step.changed)
    return name, moved, step.itemsize, [made.number for made in step.makes]


_PARTS = (Fraction(1, 2), Fraction(1, 3), Fraction(2, 3), Fraction(1, 4), Fraction(3, 4), 2)


class _Merged:
    def __init__(
        self,
        points: Sequence[tuple[Sizes, Compiled]],
        others: Iterable[CompiledCode],
        products: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self._allowed = products
        sizes = [sizes for sizes, _ in points]
        self._sizes = sizes if products else _independent(sizes)
        self._others = {product for code in others for text in code.formulas for product in parse(text)}
        self._compiled = [compiled for _, compiled in points]
        self._formulas: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._find = cache(self._search)

    def code(self) -> CompiledCode:
        first = self._compiled[0]
        forward = self._steps([one.forward for one in self._compiled])
        backward = self._steps([one.backward for one in self._compiled])
        backward_inputs = self._inputs() if self._allowed else ()
        output, *saved = first.forward.returns
        if output is None or None in saved or len(saved) + 1 != first.backward.num_inputs:
            raise UnknownCode("forward returns something beside one output and what backward takes")
        return CompiledCode(
            inputs=first.inputs,
            formulas=tuple(self._formulas),
            names=tuple(self._names),
            forward=forward,
            output=output,
            saved=tuple(one for one in saved if one is not None),
            backward=backward,
            gradients=tuple(first.backward.returns),
            backward_inputs=backward_inputs,
        )

    def _inputs(self) -> tuple[int, ...]:
        alike = zip(*(one.backward.input_bytes for one in self._compiled), strict=True)
        return tuple(self._number(self._text(numbers)) for numbers in alike)

    def _steps(self, functions: Sequence[Function]) -> tuple[Step, ...]:
        return tuple(chain.from_iterable(map(self._step, zip(*(one.steps for one in functions), strict=True))))

    def _step(self, alike: Sequence[Run | Dropped]) -> Iterator[Step]:
        """Yield a step, and before it what tuning the kernel takes.

        Kernels tuned at some sizes alone are left out: forward's sums over more than 2048 columns, beside which
        less is alive than beside other kernels of the same block.
        """
        first = alike[0]
        if isinstance(first, Dropped):
            yield Drop(str(first.number))
            return
        runs = [one for one in alike if isinstance(one, Run)]
        if all(one.is_tuned for one in runs):
            if len({len(one.changed_bytes) for one in runs}) > 1:
                raise UnknownCode(f"{first.name}: not alike in what is changed in place")
            copies = zip(*(one.changed_bytes for one in runs), strict=True)
            yield Tuning(tuple(self._number(self._text(numbers)) for numbers in copies))
        touched = zip(*(one.touched_bytes + one.changed_bytes for one in runs), strict=True)
        moved = to_text([self._find(numbers) for numbers in touched] or [(Fraction(0), ())])
        yield Operator(
            name=self._names.setdefault(first.name, len(self._names)),
            num_bytes=self._number(moved),
            itemsize=first.itemsize,
            dims=tuple(self._number(self._text(numbers)) for numbers in zip(*(one.dims for one in runs), strict=True)),
            makes=tuple(
                Allocation(made[0].number, self._number(self._text(tuple(one.num_bytes for one in made))))
                for made in zip(*(one.makes for one in runs), strict=True)
            ),
        )

    def _number(self, text: str) -> int:
        return self._formulas.setdefault(text, len(self._formulas))

    def _text(self, numbers: tuple[int, ...]) -> str:
        return to_text([self._find(numbers)])

    def _search(self, numbers: tuple[int, ...]) -> Product:
        """Return the formula whose constant is a whole number, and next to one: sizes of elements are small.

        For few sizes several may be right: then products of the block's other recordings come first.
        """
        if len(numbers) < FEWEST_POINTS and not self._allowed:
            return self._known(numbers[0])
        found, known = [], {factors for _, factors in self._others} if len(numbers) < ENOUGH_POINTS else set()
        for factors, values in self._products():
            ratio = Fraction(numbers[0], values[0])
            alike = all(number == ratio * value for number, value in zip(numbers, values, strict=True))
            if alike and _is_simple(ratio):
                distance = max(ratio, 1 / ratio) if ratio else 0
                rank = factors not in known, ratio.denominator > 1, distance, _has_parts(factors), len(factors)
                found.append((*rank, ratio, factors))
        if not found:
            raise UnknownCode(f"no formula for {list(numbers)}")
        *_, ratio, factors = min(found)
        return ratio, factors

    def _known(self, number: int) -> Product:
        """Return the formula of another recording that has this value at the only size.

        The others have sums over the tensors that a kernel touches, so that one tensor may be a part of a product.
        """
        known = sorted(self._others, key=lambda product: (len(product[1]), product))
        for part in (1, *_PARTS):
            for ratio, factors in known:
                if part * ratio * prod(self._sizes[0].get(factor, 0) for factor in factors) == number:
                    return part * ratio, factors
        if number in (0, 1):
            return Fraction(number), ()
        raise UnknownCode(f"no formula of another recording for {number}")

    def _products(self) -> list[tuple[tuple[str, ...], list[int]]]:
        if not hasattr(self, "_all"):
            self._all = list(self._candidates())
        return self._all

    def _candidates(self) -> Iterator[tuple[tuple[str, ...], list[int]]]:
        if self._allowed:
            for allowed in self._allowed:
                yield allowed, [prod(sizes[factor] for factor in allowed) for sizes in self._sizes]
            return
        symbols = [symbol for symbol in self._sizes[0] if not symbol.startswith("parts_")]
        parts = [(), *((symbol,) for symbol in self._sizes[0] if symbol.startswith("parts_"))]
        for powers in product(*(range(_HIGHEST.get(symbol, 1) + 1) for symbol in symbols)):
            for part in parts:
                factors = [s for s, power in zip(symbols, powers, strict=True) for _ in range(power)] + list(part)
                values = [1] * len(self._sizes)
                for factor in factors:
                    values = [value * sizes[factor] for value, sizes in zip(values, self._sizes, strict=True)]
                yield tuple(sorted(factors)), values


def _independent(points: list[Sizes]) -> list[Sizes]:
    """Leave out what is the same as others at all points, so that a number has one formula."""

    def same(name: str, *factors: str) -> bool:
        return all(sizes[name] == prod(sizes[factor] for factor in factors) for sizes in points)

    left_out = set()
    if same("hidden_size", "num_attention_heads", "head_dim"):
        left_out.add("hidden_size")
    if same("num_key_value_heads", "num_attention_heads"):
        left_out |= {"num_key_value_heads", "num_qkv_heads", "parts_kv", "parts_k_norm", "parts_both_k"}
    return [{name: size for name, size in sizes.items() if name not in left_out} for sizes in points]


def _is_simple(ratio: Fraction) -> bool:
    """Whether a ratio is a size of elements or of blocks of threads: by nothing but two a number is divided."""
    return ratio.denominator & (ratio.denominator - 1) == 0


def _has_parts(factors: tuple[str, ...]) -> bool:
    return any(factor.startswith("parts_") for factor in factors)
