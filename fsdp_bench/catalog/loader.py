"""The one reader of the catalogue: the built-in files, each read when first asked, and a user's laid over them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.user_file import names_of, read_entries, read_user_file
from fsdp_bench.spec.errors import SpecError, nearest
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.text import quoted

T = TypeVar("T", bound=msgspec.Struct)


def _built_in(file: str, kind: str) -> list[dict[str, Any]]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = tomllib.loads(text)[kind]
    return entries


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of gpus.toml."""
    return read_entries(_built_in("gpus.toml", "gpu"), Gpu, "gpus.toml: [[gpu]]")


@lru_cache(maxsize=1)
def servers() -> tuple[Server, ...]:
    """Return every server of servers.toml."""
    return read_entries(_built_in("servers.toml", "server"), Server, "servers.toml: [[server]]")


@lru_cache(maxsize=1)
def models() -> tuple[ModelEntry, ...]:
    """Return every model of models.toml."""
    return read_entries(_built_in("models.toml", "model"), ModelEntry, "models.toml: [[model]]")


@dataclass(frozen=True)
class Catalog:
    """The built-in catalogue with a user's entries: one of the same name replaces, others are added."""

    added_gpus: tuple[Gpu, ...] = ()
    added_servers: tuple[Server, ...] = ()
    added_models: tuple[ModelEntry, ...] = ()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every GPU."""
        return _merged(gpus(), self.added_gpus)

    def servers(self) -> tuple[Server, ...]:
        """Return every server."""
        return _merged(servers(), self.added_servers)

    def models(self) -> tuple[ModelEntry, ...]:
        """Return every model, also those that cannot be predicted or trained."""
        return _merged(models(), self.added_models)

    def gpu(self, name: str) -> Gpu:
        """Return the GPU of that name, in any case.

        Raises:
            SpecError: naming the nearest one.
        """
        return _named("gpu", name, self.gpus())

    def server(self, name: str) -> Server:
        """Return the server of that name or alias, in any case.

        Raises:
            SpecError: naming the nearest one.
        """
        return _named("server", name, self.servers())

    def model(self, name: str) -> ModelEntry:
        """Return the model of that name or alias, in any case.

        Raises:
            SpecError: naming the nearest one.
        """
        return _named("model", name, self.models())


BUILT_IN = Catalog()


def load_user_catalog(path: Path | None) -> Catalog:
    """Return the catalogue with a user's TOML file laid over it; without a file, the built-in one.

    Raises:
        SpecError: naming the file, what is wrong and what is allowed.
    """
    if path is None:
        return BUILT_IN
    tables = read_user_file(path)
    catalog = Catalog(
        added_gpus=read_entries(tables.get("gpu", []), Gpu, f"{path}: [[gpu]]"),
        added_servers=read_entries(tables.get("server", []), Server, f"{path}: [[server]]"),
        added_models=read_entries(tables.get("model", []), ModelEntry, f"{path}: [[model]]"),
    )
    for entry in catalog.added_servers:
        try:
            catalog.gpu(entry.gpu)
        except SpecError as error:
            raise SpecError(f"{path}: [[server]] {quoted(entry.name)}: {error}") from None
    return catalog


def gpu(name: str) -> Gpu:
    """Return the built-in GPU of that name, in any case.

    Raises:
        SpecError: naming the nearest one.
    """
    return BUILT_IN.gpu(name)


def server(name: str) -> Server:
    """Return the built-in server of that name or alias, in any case.

    Raises:
        SpecError: naming the nearest one.
    """
    return BUILT_IN.server(name)


def model(name: str) -> ModelEntry:
    """Return the built-in model of that name or alias, in any case.

    Raises:
        SpecError: naming the nearest one.
    """
    return BUILT_IN.model(name)


def gpu_by_product_name(product_name: str) -> Gpu | None:
    """Return the GPU that NVML or torch calls ``product_name``, the whole name; None when none or several are."""
    found = [entry for entry in gpus() if product_name in entry.product_names]
    return found[0] if len(found) == 1 else None


def _merged(built_in: tuple[T, ...], added: tuple[T, ...]) -> tuple[T, ...]:
    if not added:
        return built_in
    replaced = {name for entry in added for name in names_of(entry)}
    return (*(entry for entry in built_in if names_of(entry)[0] not in replaced), *added)


def _named(kind: str, name: str, entries: tuple[T, ...]) -> T:
    folded = name.strip().lower()
    # From the end: a user's alias wins over a built-in one.
    for entry in reversed(entries):
        if folded in names_of(entry):
            return entry
    containing = [str(getattr(entry, "name")) for entry in entries if folded and folded in names_of(entry)[0]]  # noqa: B009
    if len(containing) > 1:
        raise SpecError(f"{kind}: {quoted(name)} is not in the catalogue alone; one of {', '.join(containing)}")
    begun = [str(getattr(entry, "name")) for entry in entries if folded.startswith(f"{names_of(entry)[0]}-")]  # noqa: B009
    spellings = [*(spelling for entry in entries for spelling in names_of(entry))]
    meant = containing or sorted(begun, key=len)[-1:]
    close = f" (did you mean {meant[0]!r}?)" if meant else nearest(folded, spellings)
    close = close or f"; `fsdp-bench {'models' if kind == 'model' else 'servers'}` lists what is there"
    raise SpecError(f"{kind}: {quoted(name)} is not in the catalogue{close}")
