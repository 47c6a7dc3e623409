"""The catalogue: GPUs, servers, models and prices, from the built-in files and from a user's file.

Each built-in file is read on first use. An entry of the user's file replaces the built-in entry of the same name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.names import find_gpu, find_model, find_server
from fsdp_bench.catalog.user_file import names_of, read_entries, read_user_file
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.price import Price

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


@lru_cache(maxsize=1)
def prices() -> tuple[Price, ...]:
    """Return every price of prices.toml."""
    return read_entries(_built_in("prices.toml", "price"), Price, "prices.toml: [[price]]")


@dataclass(frozen=True)
class Catalog:
    """The built-in catalogue and a user's entries. A user's entry replaces the built-in entry of the same name."""

    added_gpus: tuple[Gpu, ...] = ()
    added_servers: tuple[Server, ...] = ()
    added_models: tuple[ModelEntry, ...] = ()
    added_prices: tuple[Price, ...] = ()

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every GPU."""
        return _merged(gpus(), self.added_gpus)

    def servers(self) -> tuple[Server, ...]:
        """Return every server."""
        return _merged(servers(), self.added_servers)

    def models(self) -> tuple[ModelEntry, ...]:
        """Return every model, including those that cannot be predicted or trained."""
        return _merged(models(), self.added_models)

    def price(self, server: Server) -> Price | None:
        """Return the price of a server. None if none is documented."""
        entries = {entry.server.lower(): entry for entry in _merged(prices(), self.added_prices)}
        return next((entries[name] for name in names_of(server) if name in entries), None)

    def gpu(self, name: str) -> Gpu:
        """Return the GPU with this name (case-insensitive), or the only GPU matching all its words.

        Raises:
            SpecError: if no GPU or several GPUs match, naming these or a misspelt one.
        """
        return find_gpu(name, self.gpus())

    def server(self, name: str) -> Server:
        """Return the server with this name or alias (case-insensitive).

        Raises:
            SpecError: if there is none, naming the nearest name.
        """
        return find_server(name, self.servers())

    def model(self, name: str) -> ModelEntry:
        """Return the model with this name or alias (case-insensitive), or of the same architecture: ``-Instruct``.

        Raises:
            SpecError: if there is none, naming a misspelt one, and what else names a model.
        """
        return find_model(name, self.models())


BUILT_IN = Catalog()


def load_user_catalog(path: Path | None) -> Catalog:
    """Return the catalogue with the entries of a user's TOML file. Without a file, return the built-in catalogue.

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
        added_prices=read_entries(tables.get("price", []), Price, f"{path}: [[price]]"),
    )
    for price in catalog.added_prices:
        try:
            catalog.server(price.server)
        except SpecError as error:
            raise SpecError(f"{path}: [[price]] {shown(price.server)}: {error}") from None
    for entry in catalog.added_servers:
        try:
            catalog.gpu(entry.gpu)
        except SpecError as error:
            raise SpecError(f"{path}: [[server]] {shown(entry.name)}: {error}") from None
    return catalog


def gpu(name: str) -> Gpu:
    """Return the built-in GPU with this name (case-insensitive).

    Raises:
        SpecError: if there is none, naming the nearest name.
    """
    return BUILT_IN.gpu(name)


def server(name: str) -> Server:
    """Return the built-in server with this name or alias (case-insensitive).

    Raises:
        SpecError: if there is none, naming the nearest name.
    """
    return BUILT_IN.server(name)


def model(name: str) -> ModelEntry:
    """Return the built-in model with this name or alias (case-insensitive).

    Raises:
        SpecError: if there is none, naming the nearest name.
    """
    return BUILT_IN.model(name)


def gpu_by_product_name(product_name: str) -> Gpu | None:
    """Return the GPU that NVML or torch reports as ``product_name``. None unless exactly one GPU matches."""
    found = [entry for entry in gpus() if product_name in entry.product_names]
    return found[0] if len(found) == 1 else None


def _merged(built_in: tuple[T, ...], added: tuple[T, ...]) -> tuple[T, ...]:
    if not added:
        return built_in
    replaced = {name for entry in added for name in names_of(entry)}
    return (*(entry for entry in built_in if names_of(entry)[0] not in replaced), *added)
