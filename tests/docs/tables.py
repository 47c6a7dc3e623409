"""The tables of TrainSetup's fields in docs/, made of what the fields say about themselves.

``python -m tests.docs.update`` writes them; tests/docs/test_formats.py holds the pages to them.
"""

import re
from collections.abc import Callable

from fsdp_bench.spec.checked import CaseInsensitiveEnum
from fsdp_bench.spec.field import Field
from fsdp_bench.spec.setup import FIELDS

NOTE = "<!-- made of fsdp_bench/spec/setup.py: python -m tests.docs.update -->\n\n"
_TABLE = re.compile(re.escape(NOTE) + r"(?:\|.*\n)+")
_TYPES = {bool: "boolean", int: "integer", float: "number"}


def keys_of_a_grid() -> list[str]:
    """The rows of docs/sweeps.md: keys, defaults, values."""
    rows = ["| key | default | values |", "|---|---|---|"]
    for one in FIELDS.values():
        alias = "" if one.word == one.name else f" (`{one.word}`)"
        rows.append(f"| `{one.name}`{alias} | {_default(one)} | {_meaning(one)} |")
    return rows


def fields_of_a_record() -> list[str]:
    """The rows of docs/results.md: fields and types; a record may lack any of them."""
    rows = [f"| `{one.name}` | {_TYPES.get(one.kind, 'string')}? |" for one in FIELDS.values()]
    return ["| field | type |", "|---|---|", *rows]


TABLES: dict[str, Callable[[], list[str]]] = {"docs/sweeps.md": keys_of_a_grid, "docs/results.md": fields_of_a_record}


def with_tables(name: str, page: str) -> str:
    """Return a page with its table as the fields say it."""
    if name not in TABLES:
        return page
    made, count = _TABLE.subn(lambda _: NOTE + "\n".join(TABLES[name]()) + "\n", page)
    assert count == 1, f"{name}: {count} tables of fields"
    return made


def _default(one: Field) -> str:
    if one.docs_default is not None:
        return one.docs_default
    if isinstance(one.default, bool):
        return str(one.default).lower()
    return f"{one.default}" if isinstance(one.default, int | float) else f'`"{one.default or "none"}"`'


def _meaning(one: Field) -> str:
    text = one.docs or one.help
    if not one.words:
        begins_a_name = text[:2].isupper()
        return (text if begins_a_name else text[0].lower() + text[1:]).rstrip(".")
    return "; ".join(filter(None, (_words(one), one.docs)))


def _words(one: Field) -> str:
    assert issubclass(one.kind, CaseInsensitiveEnum)
    aliases = one.kind.aliases.items()
    texts = []
    for word in one.words:
        others = ", ".join(f"`{alias}`" for alias, meant in aliases if meant == word)
        texts.append(f"`{word}` ({others})" if others else f"`{word}`")
    return ", ".join(texts)
