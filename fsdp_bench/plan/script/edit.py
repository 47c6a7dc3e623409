"""Values in configuration files, ``--edit config.yaml:train.batch={batch}``, of which the script sees a copy."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from fsdp_bench.spec.errors import SpecError, nearest, shown

_YAML = YAML()  # keeps comments, quotes and the form of numbers
_YAML.preserve_quotes = True


def _yaml_text(document: Any) -> str:
    output = StringIO()
    _YAML.dump(document, output)
    return output.getvalue()


_FORMS: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    ".json": (json.loads, json.dumps),
    ".toml": (tomllib.loads, tomli_w.dumps),
    ".yaml": (_YAML.load, _yaml_text),
    ".yml": (_YAML.load, _yaml_text),
}
"""Functions that read and write each kind of file."""


class Edit(NamedTuple):
    """A value in a configuration file."""

    file: str
    key: str
    """Keys with dots between them; numbers are places in lists. With ``+`` before it, it need not be there yet."""
    value: str


def read_edit(text: str) -> Edit:
    """Read ``config.yaml:train.batch={batch}``. Raises SpecError without a file, a key or a value."""
    place, equals, value = text.partition("=")
    file, colon, key = place.rpartition(":")
    if not equals or not colon or not file or not key.strip("+."):
        raise SpecError(f"edit: {shown(text)} is not allowed; FILE:KEY=VALUE, like config.yaml:train.batch={{batch}}")
    return Edit(file, key, value)


def edited(edits: Sequence[Edit], folder: Path) -> dict[str, str]:
    """Return each file's text with edited values, by absolute path; relative ones start in ``folder``.

    Values are read as YAML reads them. Raises SpecError for a file that is no YAML, TOML or JSON, or lacks the key.
    """
    documents: dict[Path, Any] = {}
    for edit in edits:
        path = folder / edit.file
        if path not in documents:
            documents[path] = _parsed(path)
        _set(documents[path], edit)
    return {str(path.resolve()): _text(path, document) for path, document in documents.items()}


def _text(path: Path, document: Any) -> str:
    try:
        return _FORMS[path.suffix.lower()][1](document)
    except TypeError as error:
        raise SpecError(f"edit: {str(path)!r} cannot have a value of this kind: {error}") from None


def _parsed(path: Path) -> Any:
    if path.suffix.lower() not in _FORMS:
        raise SpecError(f"edit: {str(path)!r} is not allowed; a file that ends in {', '.join(_FORMS)}")
    try:
        return _FORMS[path.suffix.lower()][0](path.read_text())
    except OSError as error:
        raise SpecError(f"edit: {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, YAMLError) as error:
        why = " ".join(str(error).split())
        raise SpecError(f"edit: {str(path)!r} is not {path.suffix[1:].upper()}: {why}") from None


def _set(document: Any, edit: Edit) -> None:
    *parents, last = edit.key.removeprefix("+").split(".")
    is_new, inner = edit.key.startswith("+"), document
    for depth, key in enumerate(parents):
        if is_new and isinstance(inner, dict):
            inner.setdefault(key, {})
        inner = inner[_found(inner, key, edit, ".".join(parents[:depth]))]
    place = last if is_new and isinstance(inner, dict) else _found(inner, last, edit, ".".join(parents))
    try:
        inner[place] = _YAML.load(edit.value)
    except YAMLError as error:
        why = f"is no value of YAML: {getattr(error, 'problem', error)}"
        as_text = f"{edit.file}:{edit.key}={json.dumps(edit.value, ensure_ascii=False)} is that text"
        raise SpecError(f"edit: {shown(edit.value)} {why}; {as_text}") from None


def _found(inner: Any, key: str, edit: Edit, above: str) -> Any:
    """Return a key as a mapping or a list takes it, which has it."""
    if isinstance(inner, list) and key.isdecimal() and int(key) < len(inner):
        return int(key)
    if isinstance(inner, dict):
        names = {str(name): name for name in inner}
        if key in names:
            return names[key]
        where = f"under {above!r}" if above else "in it"
        raise SpecError(
            f"edit: {edit.file} has no {key!r} {where}{nearest(key, names)}; {edit.file}:+{edit.key}={edit.value}"
            " adds a key"
        )
    kind = f"a list of {len(inner)}" if isinstance(inner, list) else f"the value {shown(inner)}"
    raise SpecError(f"edit: {edit.file} has no {edit.key!r}: {above or 'the file'} is {kind}")
