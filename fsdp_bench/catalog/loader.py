"""The catalogue of GPUs, servers, models and prices: built-in files, whose entries a user's file replaces by name."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from fsdp_bench.catalog.model_entry import ModelEntry
from fsdp_bench.catalog.names import find_gpu, find_model, find_server
from fsdp_bench.catalog.user_file import TABLES, names_of, read_entries, read_user_file
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.hardware import Gpu, Server
from fsdp_bench.spec.price import Price


@cache
def _built_in(table: str) -> tuple[Any, ...]:
    text = Path(__file__).with_name(f"{table}s.toml").read_text(encoding="utf-8")
    return read_entries(tomllib.loads(text)[table], TABLES[table], f"{table}s.toml: [[{table}]]")


@dataclass(frozen=True)
class Catalog:
    """The built-in catalogue and a user's entries. A user's entry replaces the built-in entry of the same name."""

    added: tuple[Gpu | Server | ModelEntry | Price, ...] = ()
    power: str | float | None = None
    """A power limit that is stated for the GPUs that are looked up."""

    def under_power(self, limit: str | float | None) -> Self:
        """Return the catalogue whose ``gpu`` and ``gpu_of`` return GPUs under a power limit; None: as they are."""
        return replace(self, power=limit)

    def _all(self, table: str) -> tuple[Any, ...]:
        added = [entry for entry in self.added if isinstance(entry, TABLES[table])]
        if not added:
            return _built_in(table)
        replaced = {name for entry in added for name in names_of(entry)}
        return (*(entry for entry in _built_in(table) if names_of(entry)[0] not in replaced), *added)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every GPU."""
        return self._all("gpu")

    def servers(self) -> tuple[Server, ...]:
        """Return every server."""
        return self._all("server")

    def models(self) -> tuple[ModelEntry, ...]:
        """Return every model, including those that cannot be predicted or trained."""
        return self._all("model")

    def prices(self) -> tuple[Price, ...]:
        """Return every price."""
        return self._all("price")

    def price(self, server: Server) -> Price | None:
        """Return the price of a server. None if none is documented."""
        entries = {entry.server.lower(): entry for entry in self.prices()}
        return next((entries[name] for name in names_of(server) if name in entries), None)

    def gpu(self, name: str) -> Gpu:
        """Return the GPU with this name, or the only one with all its words. Raises SpecError for none or several."""
        found = find_gpu(name, self.gpus())
        return found if self.power is None else found.under_power(self.power)

    def gpu_of(self, server: Server) -> Gpu:
        """Return a server's GPU under the power limit that is stated, else under what is documented of the server."""
        found, own = self.gpu(server.gpu), server.gpu_power
        if own is None or self.power is not None or own.watts == found.limit_watts:
            return found
        return found.under_power(own.watts, own.source)

    def server(self, name: str) -> Server:
        """Return the server with this name or alias. Raises SpecError, naming the nearest, if there is none."""
        return find_server(name, self.servers())

    def model(self, name: str) -> ModelEntry:
        """Return the model with this name, or of the same architecture: ``-Instruct``. Raises SpecError for none."""
        return find_model(name, self.models())


BUILT_IN = Catalog()
gpus, servers, models, prices = BUILT_IN.gpus, BUILT_IN.servers, BUILT_IN.models, BUILT_IN.prices
gpu, server, model = BUILT_IN.gpu, BUILT_IN.server, BUILT_IN.model


def load_user_catalog(path: Path | None) -> Catalog:
    """Return the catalogue with the entries of a user's file, if there is one. Raises SpecError, naming it."""
    if path is None:
        return BUILT_IN
    tables = read_user_file(path)
    read = (read_entries(tables.get(table, []), kind, f"{path}: [[{table}]]") for table, kind in TABLES.items())
    catalog = Catalog(tuple(entry for entries in read for entry in entries))
    for entry in catalog.added:
        try:
            if isinstance(entry, Price):
                catalog.server(entry.server)
            elif isinstance(entry, Server):
                catalog.gpu(entry.gpu)
        except SpecError as error:
            table = "price" if isinstance(entry, Price) else "server"
            raise SpecError(f"{path}: [[{table}]] {shown(entry.name)}: {error}") from None
    return catalog


def gpu_by_product_name(product_name: str) -> Gpu | None:
    """Return the GPU that NVML or torch reports as ``product_name``. None unless exactly one GPU matches."""
    found = [entry for entry in gpus() if product_name in entry.product_names]
    return found[0] if len(found) == 1 else None
