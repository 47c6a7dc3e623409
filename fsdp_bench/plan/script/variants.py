"""Variants of a command: what is rehearsed for each combination of placeholders, hardware and strategies."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fsdp_bench.plan.rehearse_command import CommandToRehearse, command_to_rehearse
from fsdp_bench.plan.script.template import Placeholder, Template, literal, read_placeholder
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.setup import ShardingStrategy

LISTS = ("server", "gpu", "nodes", "gpus_per_node", "world_size", "strategy")
"""Options of ``rehearse`` that take several values. A command may name them as placeholders, too."""

COUNTS = ("nodes", "gpus_per_node", "world_size")


@dataclass(frozen=True)
class Variant:
    """One combination."""

    values: Mapping[str, str]
    """The values that differ between the combinations, by the name of the placeholder or option."""
    command: tuple[str, ...]
    """The words of the command with these values, after the variables and before the edits that it finds."""
    template: str
    """The command with its placeholders, as the user gave it."""
    asked: CommandToRehearse | None
    refused: str | None = None
    """Why it cannot be rehearsed: there are no such GPUs, for instance."""

    @property
    def title(self) -> str:
        """Its values in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.values.items()) or shlex.join(self.command)


@dataclass(frozen=True)
class ScriptCommand:
    """A command with placeholders, in its words, its environment and its configuration files."""

    command: Template
    environment: Mapping[str, Template]
    edits: tuple[Template, ...]
    """Each of one word, as ``--edit`` takes it."""
    options: Mapping[str, Any]
    """The arguments of ``command_to_rehearse`` that are the same for all variants."""

    @property
    def placeholders(self) -> set[str]:
        """The names of the placeholders that are used somewhere."""
        return {name for template in (self.command, *self.environment.values(), *self.edits) for name in template.names}

    @property
    def text(self) -> str:
        """The command as the user gave it."""
        settings = [f"{name}={template.words[0]}" for name, template in self.environment.items()]
        words = self.command.words if self.command.placeholders else self.command.filled({})
        return " ".join([*settings, *words, *_with(template.words[0] for template in self.edits)])

    def variant(self, values: Mapping[str, str], shown_values: Mapping[str, str] | None = None) -> Variant:
        """Return the variant of these values, named by ``shown_values``. Raises SpecError if it cannot be rehearsed."""
        words = self.command.filled(values)
        environment = {name: template.filled(values)[0] for name, template in self.environment.items()}
        lists: dict[str, Any] = {
            name: int(value) if name in COUNTS else value for name, value in values.items() if name in LISTS
        }
        if "strategy" in self.placeholders:  # the script's own words say it
            lists.pop("strategy", None)
        asked = command_to_rehearse(
            words, **self.options, **lists, environment=environment, edited=self._edited(values)
        )
        settings = [f"{name}={value}" for name, value in environment.items()]
        found = (*settings, *words, *_with(template.filled(values)[0] for template in self.edits))
        return Variant(values if shown_values is None else shown_values, found, self.text, asked)

    def _edited(self, values: Mapping[str, str]) -> dict[str, str]:
        if not self.edits:
            return {}
        from fsdp_bench.plan.script.edit import edited, read_edit

        return edited([read_edit(template.filled(values)[0]) for template in self.edits], Path.cwd())


@dataclass(frozen=True)
class Combinations:
    """All that one command line asks for."""

    script: ScriptCommand
    values: Mapping[str, tuple[str, ...]]
    """The values of each placeholder and of each option of LISTS that is given."""

    def variants(self) -> list[Variant]:
        """Return every combination, each with its reason if it cannot run. Raises SpecError if none can."""
        found = [self.variant(dict(zip(self.values, chosen, strict=True))) for chosen in product(*self.values.values())]
        if all(one.refused is not None for one in found):
            raise SpecError(found[0].refused)
        return found

    def variant(self, values: Mapping[str, str]) -> Variant:
        """Return one combination. One that cannot run says why."""
        differing = {name: value for name, value in values.items() if len(self.values[name]) > 1}
        try:
            return self.script.variant(values, differing)
        except SpecError as error:
            words = tuple(self.script.command.filled(values))
            return Variant(differing, words, self.script.text, None, str(error))


def read_combinations(
    words: str | Sequence[str],
    each: Mapping[str, Sequence[object]] | Sequence[str] = (),
    env: Sequence[str] = (),
    edit: Sequence[str] = (),
    **options: Any,
) -> Combinations:
    """Read a command with placeholders, and options of ``command_to_rehearse``, of which those of LISTS may be many.

    ``each`` has values by placeholder, or texts like ``batch=1,2,4``; ``env`` is ``NAME=VALUE``, ``edit``
    ``FILE:KEY=VALUE``. Raises SpecError for placeholders without values or use, and values that are not allowed.
    """
    given = tuple(shlex.split(words) if isinstance(words, str) else words)
    placeholders = _placeholders(each)
    lists = {name: _list(name, options.pop(name, None)) for name in LISTS}
    values = {name: found for name, found in lists.items() if found}
    known = {**{name: Placeholder(name, found) for name, found in values.items()}, **placeholders}
    names_hardware = any(f"{{{name}}}" in word for name in values for word in given)
    if placeholders or env or edit or names_hardware or any(len(found) > 1 for found in values.values()):
        command = Template(given, known)
        command.check("command")
    else:
        command = literal(given)  # nothing is asked for in which braces would mean something
    environment = dict(_variable(text, known) for text in env)
    edits = tuple(Template((text,), known) for text in edit)
    for template in edits:
        template.check("edit")
    script = ScriptCommand(command, environment, edits, options)
    if unused := [name for name in placeholders if name not in script.placeholders]:
        raise SpecError(f"each: {{{unused[0]}}} is nowhere in the command, --env or --edit")
    values |= {name: one.values for name, one in placeholders.items()}
    return Combinations(script, values)


def _placeholders(each: Mapping[str, Sequence[object]] | Sequence[str]) -> dict[str, Placeholder]:
    if isinstance(each, Mapping):
        found = [Placeholder(name, tuple(map(_text, values))) for name, values in each.items()]
    else:
        found = [read_placeholder(text) for text in each]
    for one in found:
        if one.name in LISTS and one.name != "strategy":
            raise SpecError(f"each: {one.name} is an option: --{one.name.replace('_', '-')} {','.join(one.values)}")
    named = {one.name: one for one in found}
    if len(named) < len(found):
        raise SpecError("each: a placeholder is given twice; all of its values go into one --each")
    return named


def _with(edits: Iterable[str]) -> list[str]:
    """Return the words that follow a command for its edits: ``with A and B``."""
    return [word for number, edit in enumerate(edits) for word in ("and" if number else "with", edit)]


def _text(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _list(name: str, given: object) -> tuple[str, ...]:
    """Return the values of an option: of one value, several, a text with commas, or None."""
    if given is None:
        return ()
    words = given.split(",") if isinstance(given, str) else given if isinstance(given, list | tuple) else [given]
    found = tuple(dict.fromkeys(part.strip() for word in words for part in str(word).split(",")))
    if name == "strategy":
        everything = [one.value for one in ShardingStrategy]
        return tuple(everything) if found == ("all",) else tuple(ShardingStrategy(word).value for word in found)
    for word in found if name in COUNTS else ():
        if not word.isdecimal() or int(word) < 1:
            raise SpecError(f"{name.replace('_', '-')}: {shown(word)} is not allowed; whole numbers, 1 or more")
    return found


def _variable(text: str, known: Mapping[str, Placeholder]) -> tuple[str, Template]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"env: {shown(text)} is not allowed; NAME=VALUE, like FSDP_STRATEGY={{strategy}}")
    template = Template((value,), known)
    template.check("env")
    return name, template
