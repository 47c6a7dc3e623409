"""Reads the catalogue's TOML files, ours and a user's: tables [[gpu]], [[server]], [[model]] and [[price]]."""

from datetime import date
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.spec.checked import build
from fsdp_bench.spec.errors import SpecError, nearest, shown
from fsdp_bench.spec.files import read_document
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.price import Price

TABLES: dict[str, type[Gpu | Server | ModelEntry | Price]] = {
    "gpu": Gpu,
    "server": Server,
    "model": ModelEntry,
    "price": Price,
}

_LINKS = ("intra_node", "host_link", "inter_node", "power", "gpu_power")


class NamedEntry(Protocol):
    """An entry of the catalogue. It may have ``aliases``, and ``same_architecture``."""

    @property
    def name(self) -> str:
        """Its name, by which it is found in any case."""


T = TypeVar("T", bound=NamedEntry)


def read_user_file(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the tables of a user's file. An entry without a source gets the file's name and date as its source.

    Raises SpecError, naming the file, what is wrong and what is allowed.
    """
    tables: dict[str, list[dict[str, Any]]] = read_document(path, "TOML")
    day = date.fromtimestamp(path.stat().st_mtime).isoformat()
    for kind, entries in tables.items():
        if kind not in TABLES:
            raise SpecError(
                f"{path}: [{kind}] is not allowed; [[gpu]], [[server]], [[model]], [[price]]{nearest(kind, TABLES)}"
            )
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise SpecError(f"{path}: {kind}: write each as a table [[{kind}]]")
        for entry in entries:
            source = {"title": str(path), "date": day}
            for holder in (entry, *(entry[link] for link in _LINKS if isinstance(entry.get(link), dict))):
                holder.setdefault("source", source)
            if "usable_memory_bytes" in entry:
                entry.setdefault("usable_memory_source", source)
    return tables


def read_entries(entries: list[dict[str, Any]], kind: type[T], where: str) -> tuple[T, ...]:
    """Turn tables into entries. Raises SpecError for unknown keys and a name that occurs twice, naming the place."""
    read = tuple(_read_entry(entry, kind, f"{where} number {i}") for i, entry in enumerate(entries, 1))
    seen: set[str] = set()
    for entry in read:
        for name in names_of(entry):
            if not name.isprintable():
                raise SpecError(f"{where}: the name {shown(name)} is not allowed; printable characters")
            if name in seen:
                raise SpecError(f"{where}: the name {shown(name)} is taken twice")
            seen.add(name)
    return read


def own_names(entry: NamedEntry) -> tuple[str, ...]:
    """Return the name and the aliases of an entry in lower case."""
    return tuple(name.lower() for name in (entry.name, *getattr(entry, "aliases", ())))


def names_of(entry: NamedEntry) -> tuple[str, ...]:
    """Return the names by which an entry is found: its own, and those of models with the same architecture."""
    others = [other.lower() for other in getattr(entry, "same_architecture", ())]
    return (*own_names(entry), *others, *(other.rpartition("/")[2] for other in others if "/" in other))


def _read_entry(entry: dict[str, Any], kind: type[Any], where: str) -> Any:
    name = entry.get("server" if kind is Price else "name")
    if isinstance(name, str):
        where = f"{where.rsplit(' number', 1)[0]} {shown(name)}"
    try:
        return build(kind, entry)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
