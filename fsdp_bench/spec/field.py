"""Field: what a field of a setup says about itself where it is declared.

    api: Annotated[Api, Field("--api fsdp1|fsdp2", "FullyShardedDataParallel or fully_shard.", group=SHARDING)]

Options of the command line, keys of sweep files, columns of the terminal, the page and CSV files, labels, trial IDs and
the tables of docs/ are derived from it.
"""

import types
import typing
from enum import Enum
from typing import Annotated, Any

import msgspec

from fsdp_bench.spec.units import format_count

DEFAULT = "default"
"""The text of None: something else decides by default."""

SHARDING = "Sharding"
STEP = "Training step"
WRAPPING = "Wrapping"
"""Sections of the help of a command."""


class _Option(msgspec.Struct, frozen=True):
    form: str | None
    """The option's form: ``--batch N``, ``--compile``, ``--this/--no-that``. None: there is no option."""
    help: str
    """Its text in ``--help`` and, without ``docs``, in docs/sweeps.md."""


class Field(_Option, frozen=True, kw_only=True):
    """A field of a setup: a note in ``Annotated``, to which ``fields_of`` adds name, type and default."""

    group: str = STEP
    """The section of the help."""
    before: str | None = None
    """The field before whose option the help has this one, if that is not the next in the struct."""
    since: str | None = None
    """The day on which the field was added: a trial's ID has it only where it differs from its default, so that trials
    that were recorded before keep their IDs. Every new field needs it."""
    seldom: bool = True
    """Whether it is printed only where it differs from its default."""
    column: str | None = None
    """The header of its column in the terminal, if that is not the option's name."""
    has_column: bool = True
    """Whether tables that compare setups have a column for it."""
    short: str | None = None
    """Its name in labels of trials and in charts, if that is not the field's."""
    labelled: bool = False
    """Whether a trial's label has its value in any case, in words of its own."""
    is_plain: bool = False
    """Whether a value says in a sentence what it is: ``fsdp2``, without ``api``."""
    is_magnitude: bool = False
    """Whether it is a number that is written like ``100M``."""
    planned: bool = False
    """Whether ``plan`` chooses among several values of it."""
    not_planned: str | None = None
    """Why ``plan`` refuses it."""
    needs_fsdp: bool = False
    """Whether stating it implies FSDP, on one GPU too. Every field of WRAPPING does."""
    of_step: bool = True
    """Whether it changes memory or time of a step."""
    not_exported: str | None = None
    """Why no exported script has it, and what to do instead, where it differs from its default."""
    docs: str | None = None
    """Its text in docs/sweeps.md; behind the words of an enum, which are there in any case."""
    docs_default: str | None = None
    """The default in docs/sweeps.md, if that is not the struct's."""

    name: str = ""
    kind: type = object
    """``bool``, ``int``, ``float``, ``str``, an enum, or another type of words."""
    is_optional: bool = False
    """Whether it may be None: something else decides then."""
    default: Any = None

    @property
    def option(self) -> str | None:
        """The name of its option, with underscores: ``batch``. None if there is none."""
        return None if self.form is None else option_of(self.form)

    @property
    def word(self) -> str:
        """The name of its option; of a field without one its own."""
        return self.option or self.name

    @property
    def header(self) -> str:
        """The header of its column in the terminal."""
        return self.column or self.word.replace("_", "\n")

    @property
    def title(self) -> str:
        """Its name in labels of trials and in charts."""
        return self.short or self.name.replace("_", " ")

    @property
    def is_size(self) -> bool:
        """Whether it is a number that is printed in any case."""
        return self.kind is int and not self.seldom

    @property
    def has_words(self) -> bool:
        """Whether its values are words that may have aliases: an enum's, or names of precisions."""
        return self.kind not in (bool, int, float, str)

    @property
    def words(self) -> list[str]:
        """The words of an enum."""
        return [member.value for member in self.kind] if issubclass(self.kind, Enum) else []

    def text(self, value: Any) -> str:
        """Return a value as text in a table."""
        if isinstance(value, bool):
            return "on" if value else "off"
        if value is None:
            return DEFAULT
        return format_count(value) if self.is_magnitude and isinstance(value, int) else str(value)

    def phrase(self, value: Any) -> str:
        """Return the field with a value, in a label: ``batch 4``, ``compile``, ``no limit all gathers``."""
        if isinstance(value, bool):
            return self.title if value else f"no {self.title}"
        return f"{self.title} {value}"


def option_of(form: str) -> str:
    """Return an option's name, with underscores, from how it is written on the command line."""
    return form.partition(" ")[0].partition("/")[0].strip("-").replace("-", "_")


def fields_of(struct: type[msgspec.Struct]) -> dict[str, Field]:
    """Return the fields of a struct by name. Raises TypeError for a field that says nothing about itself."""
    hints = typing.get_type_hints(struct, include_extras=True)
    return {one.name: _read(one.name, hints[one.name], one.default) for one in msgspec.structs.fields(struct)}


def in_order_of_help(fields: dict[str, Field]) -> list[Field]:
    """Return the fields that have an option, as the help has them: by section, there in the order of the struct."""
    order = list(fields)
    have = [one for one in fields.values() if one.form is not None]
    places = {one.name: (order.index(one.before) - 0.5 if one.before else order.index(one.name)) for one in have}
    groups = list(dict.fromkeys((SHARDING, STEP, WRAPPING, *(one.group for one in have))))
    return sorted(have, key=lambda one: (groups.index(one.group), places[one.name]))


def _read(name: str, hint: Any, default: Any) -> Field:
    bare, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    note = next((note for note in notes if isinstance(note, Field)), None)
    if note is None:
        raise TypeError(f"{name}: the field says nothing about itself; Annotated[..., Field(option, help)]")
    arms = typing.get_args(bare) if typing.get_origin(bare) in (typing.Union, types.UnionType) else (bare,)
    kind = next(arm for arm in arms if arm is not type(None))
    return msgspec.structs.replace(
        note,
        name=name,
        kind=typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind,
        is_optional=type(None) in arms,
        default=default,
        needs_fsdp=note.needs_fsdp or note.group == WRAPPING,
    )
