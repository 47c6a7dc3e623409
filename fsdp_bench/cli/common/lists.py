"""Options of several values, such as ``--batch 1,2,4``: how they are read.

``all`` stands for every known value of an option with a vocabulary, ``default`` for an option that is not given where
that has no other name. Values of some options contain commas themselves: several of these go with ``;`` between them.
"""

import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import click

from fsdp_bench.catalog.lookup import CODES
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.setup import OPTIONS, Precision
from fsdp_bench.spec.vocabulary import NAMED_PRECISIONS

_KINDS: dict[str, type] = {
    **{name: str if one.is_magnitude else one.kind for name, one in OPTIONS.items()},
    **dict.fromkeys(("nodes", "gpus_per_node", "world_size"), int),
    "family": Family,
}
"""The type of a word of an option; text for options that are not here."""
_WITH_COMMAS = ("lora", "qlora")
"""Options whose values contain commas: several go with ``;`` between them."""
_WITH_DEFAULT = (*(name for name, one in OPTIONS.items() if one.is_optional), *_WITH_COMMAS)
"""Options whose default has no other name: ``default`` in a list stands for it."""


class Count(click.IntRange):
    """A click type: a whole number of at least 1, and at most ``most`` if that is given."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__(1, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert text to a number. Raises SpecError if the text is not a whole number in the range."""
        try:
            count = int(value)
        except ValueError:
            count = 0
        if count < 1 or count > (self.max or count):
            allowed = "1 or more" if self.max is None else f"1 to {self.max:g}"
            name = param.opts[0].lstrip("-") if param is not None else "count"
            raise SpecError(f"{name}: {shown(value)} is not allowed; a whole number, {allowed}")
        return count


COUNT = Count()


class Values(click.ParamType[Any]):
    """A click type: the value of an option, or the tuple of its several values."""

    name = "text"

    def __init__(self, option: str) -> None:
        self.option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the words of a list, each counted once. Raises SpecError for a word that is not allowed."""
        if not isinstance(value, str):
            return value
        if ctx is not None:
            ctx.meta[self.option] = value
        values = tuple(dict.fromkeys(_read(self.option, word, param, ctx) for word in _words(self.option, value)))
        return values if len(values) > 1 else values[0]


def _read(name: str, word: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if name in _WITH_DEFAULT and _folded(word) == "default":
        return None
    kind = _KINDS.get(name, str)
    if kind is bool:
        return _on_or_off(name, word)
    if kind is int:
        return COUNT.convert(word.strip(), param, ctx)
    if kind is float:
        return click.types.convert_type(float).convert(word.strip(), param, ctx)
    if kind is Precision:
        return str(Precision.parse(word))
    return str(kind(word)) if issubclass(kind, StrEnum) else word.strip()


def _on_or_off(name: str, word: str) -> bool:
    switches = {"on": True, "off": False, "true": True, "false": False}
    if _folded(word) not in switches:
        raise SpecError(f"{name.replace('_', '-')}: {shown(word)} is not allowed; on, off, or on,off for both")
    return switches[_folded(word)]


def _words(name: str, text: str) -> list[str]:
    """Return the words of a list; for ``all`` those of every known value."""
    if _folded(text) == "all" and (known := _known(name)):
        return known
    if name == "checkpointing_policy":
        return [policy for part in text.split(";") for policy in _policies(part)]
    return text.split(";" if name in _WITH_COMMAS else ",")


def _known(name: str) -> list[str]:
    kind = _KINDS.get(name, str)
    if kind in (Precision, bool):
        return list(NAMED_PRECISIONS) if kind is Precision else ["on", "off"]
    return list(CODES) if name == "code" else [str(member) for member in kind] if issubclass(kind, StrEnum) else []


def _policies(text: str) -> Iterator[str]:
    """Yield the policies of a text: operators that follow each other are one policy, every other word is its own."""
    is_operator = itertools.groupby(
        text.split(","), key=lambda word: not _folded(word).startswith(("every", "default"))
    )
    for are_operators, words in is_operator:
        yield from [",".join(words)] if are_operators else words


def _folded(word: str) -> str:
    return word.strip().lower()
