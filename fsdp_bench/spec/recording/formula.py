"""Sizes as formulas: ``B*S*hidden_size*2``, ``up(S,32)*num_attention_heads*4 + 512``.

A formula is a sum of products. A factor is an integer, a fraction such as ``1/2``, a symbol, or ``up(symbol,k)``: the
symbol rounded up to a multiple of k. ``B`` is the micro-batch size and ``S`` the sequence length; other symbols are
fields of Hugging Face's config.json.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

from fsdp_bench.spec.errors import SpecError, shown

Product = tuple[Fraction, tuple[str, ...]]
"""A coefficient and the other factors."""

_UP = re.compile(r"up\((\w+),([1-9]\d*)\)")
_NUMBER = re.compile(r"-?\d+(/[1-9]\d*)?")
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


@lru_cache(maxsize=65536)
def parse(text: str) -> tuple[Product, ...]:
    """Return the products of a formula. Raises SpecError if it is no formula."""
    products = []
    for term in text.split(" + "):
        coefficient, factors = Fraction(1), []
        for factor in term.split("*"):
            if _NUMBER.fullmatch(factor):
                coefficient *= Fraction(factor)
            elif _SYMBOL.fullmatch(factor) or _UP.fullmatch(factor):
                factors.append(factor)
            else:
                raise SpecError(f"formula: {shown(text)} is not allowed; a sum of products like 'B*S*hidden_size*2'")
        products.append((coefficient, tuple(sorted(factors))))
    return tuple(products)


def symbols_of(text: str) -> set[str]:
    """Return the symbols in a formula."""
    return {_up(factor)[0] for _, factors in parse(text) for factor in factors}


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Return the value of a formula. Raises SpecError for an unknown symbol, or if the value is no whole number."""
    total = Fraction(0)
    for coefficient, factors in parse(text):
        product = 1
        for factor in factors:
            product *= factor_value(factor, values)
        total += coefficient * product
    if total.denominator != 1:
        raise SpecError(f"formula: {text} is {float(total):g}, which is not a whole number")
    return total.numerator


def factor_value(factor: str, values: Mapping[str, int]) -> int:
    """Return the value of a symbol or of ``up(symbol,k)``. Raises SpecError for a symbol without a value."""
    symbol, multiple = _up(factor)
    if symbol not in values:
        raise SpecError(f"formula: {symbol} has no value")
    return -(-values[symbol] // multiple) * multiple


def _up(factor: str) -> tuple[str, int]:
    found = _UP.fullmatch(factor)
    return (factor, 1) if found is None else (found[1], int(found[2]))


def to_text(products: tuple[Product, ...] | list[Product]) -> str:
    """Return a formula's text: like products added up, in a fixed order."""
    sums: dict[tuple[str, ...], Fraction] = {}
    for coefficient, factors in products:
        key = tuple(sorted(factors))
        sums[key] = sums.get(key, Fraction(0)) + coefficient
    terms = [
        "*".join([*factors, *([str(coefficient)] if coefficient != 1 or not factors else [])])
        for factors, coefficient in sorted(sums.items(), key=lambda item: (-len(item[0]), item[0]))
        if coefficient
    ]
    return " + ".join(terms) or "0"


def multiply(texts: list[str]) -> str:
    """Return the product of some formulas."""
    products: list[Product] = [(Fraction(1), ())]
    for text in texts:
        products = [(a * c, (*b, *d)) for a, b in products for c, d in parse(text)]
    return to_text(products)
