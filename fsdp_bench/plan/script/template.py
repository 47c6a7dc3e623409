"""A command with placeholders: ``{batch}`` stands for a value, ``{ckpt:--grad-ckpt|}`` for a text that it chooses."""

import csv
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_bench.spec.errors import SpecError, nearest, shown

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)(?::([^{}]*))?\}")
"""A placeholder; or a doubled brace, which stands for one."""

SWITCHES = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}


class Placeholder(NamedTuple):
    """A name, and the values that it takes."""

    name: str
    values: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return all(value.lower() in SWITCHES for value in self.values)


def read_placeholder(text: str) -> Placeholder:
    """Read ``batch=1,2,4`` or ``betas='"0.9,0.95",0.9'``. Raises SpecError without a name or values."""
    name, equals, values = text.partition("=")
    words = next(csv.reader([values], skipinitialspace=True), []) if equals else []
    if not re.fullmatch(r"[A-Za-z_]\w*", name.strip()) or not words:
        raise SpecError(f"each: {shown(text)} is not allowed; a name and its values, like batch=1,2,4")
    return Placeholder(name.strip(), tuple(dict.fromkeys(word.strip() for word in words)))


@dataclass(frozen=True)
class Template:
    """Words of a command, with placeholders in them."""

    words: tuple[str, ...]
    placeholders: Mapping[str, Placeholder]

    @property
    def names(self) -> list[str]:
        """The placeholders that the words use."""
        found = (match[1] for word in self.words for match in PLACEHOLDER.finditer(word) if match[1])
        return list(dict.fromkeys(found))

    def check(self, what: str) -> None:
        """Refuse words that use a placeholder without values, or choose among more or fewer texts than it has values.

        Raises:
            SpecError: naming ``what`` the words are, the placeholder, and what would help.
        """
        for word in self.words:
            for match in PLACEHOLDER.finditer(word):
                if match[1] is not None:
                    self._check(match, what)

    def _check(self, match: re.Match[str], what: str) -> None:
        name, texts = match[1], match[2]
        if name not in self.placeholders:
            close = nearest(name, self.placeholders)
            raise SpecError(
                f"{what}: {{{name}}} has no values{close}; --each {name}=VALUE,.. gives it some, and {{{{{name}}}}}"
                " is the text itself"
            )
        if texts is None:
            return
        placeholder, count = self.placeholders[name], texts.count("|") + 1
        if placeholder.is_switch and count != 2:
            raise SpecError(f"{what}: {{{name}:{texts}}} has {count} texts; two, for on and for off: {{{name}:--x|}}")
        if not placeholder.is_switch and count != len(placeholder.values):
            raise SpecError(
                f"{what}: {{{name}:{texts}}} has {count} texts for the {len(placeholder.values)} values of {name}; one"
                " for each, with | between them"
            )

    def filled(self, values: Mapping[str, str]) -> list[str]:
        """Return the words with values filled in; a placeholder alone in a word may become several words, or none."""
        found = []
        for word in self.words:
            match = PLACEHOLDER.fullmatch(word)
            if match is not None and match[2] is not None:
                found += shlex.split(self._text(match, values))
            else:
                found.append(PLACEHOLDER.sub(lambda match: self._text(match, values), word))
        return found

    def _text(self, match: re.Match[str], values: Mapping[str, str]) -> str:
        if match[1] is None:
            return match[0][0]
        value = values[match[1]]
        if match[2] is None:
            return value
        placeholder, texts = self.placeholders[match[1]], match[2].split("|")
        return texts[not SWITCHES[value.lower()] if placeholder.is_switch else placeholder.values.index(value)]


def literal(words: Sequence[str]) -> Template:
    """Return words in which braces are nothing special."""
    return Template(tuple(word.replace("{", "{{").replace("}", "}}") for word in words), {})
