"""Price: what an hour of a server costs, with its source and date. A price that is not documented is None."""

import re
from typing import Annotated, NamedTuple

from msgspec import Meta

from fsdp_bench.spec.checked import CaseInsensitiveEnum, Checked
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.hardware import Source

HOURS_PER_DAY = 24

MOST_PER_HOUR = 1e9
"""In any currency. Larger prices have a slip."""
Money = Annotated[float, Meta(ge=1e-6, le=1e12)]
Years = Annotated[float, Meta(ge=0.01, le=100)]


class Tariff(CaseInsensitiveEnum):
    """The tariff of a server."""

    ON_DEMAND = "on-demand"
    RESERVED = "reserved"
    """Committed to for a time, as the entry's note says."""
    SPOT = "spot"
    """At the price of the day; the provider may take the server back."""


class Price(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of one server, in one currency and one region. Rates are for the whole server and one hour.

    Raises SpecError for a date that is none, and for an entry without any price.
    """

    server: str
    currency: str = "USD"
    region: str | None = None
    source: Source
    on_demand_per_hour: Money | None = None
    reserved_per_hour: Money | None = None
    spot_per_hour: Money | None = None
    purchase: Money | None = None
    """The price at which the server is bought."""
    years_of_use: Years | None = None
    """Years over which ``purchase`` is spread."""
    electricity_per_kwh: Money | None = None

    def _check(self) -> None:
        if not any((self.on_demand_per_hour, self.reserved_per_hour, self.spot_per_hour, self.purchase)):
            raise SpecError("has no price; on_demand_per_hour, reserved_per_hour, spot_per_hour or purchase")
        if (self.purchase is None) != (self.years_of_use is None):
            raise SpecError("purchase and years_of_use go together")

    @property
    def name(self) -> str:
        """The server: entries of the catalogue are found by name."""
        return self.server

    def per_hour(self, tariff: Tariff, watts: float | None = None) -> float | None:
        """Return the price of one server for one hour; None if the tariff is not documented.

        A server of one's own costs its purchase over its years of use, and its electricity, whatever the tariff.
        """
        if self.purchase is not None and self.years_of_use is not None:
            power = 0.0
            if self.electricity_per_kwh is not None:
                if watts is None:
                    return None
                power = watts / 1000 * self.electricity_per_kwh
            return self.purchase / (self.years_of_use * 365.25 * HOURS_PER_DAY) + power
        rate: float | None = getattr(self, f"{tariff.name.lower()}_per_hour")
        return rate


class StatedPrice(NamedTuple):
    """A price that the user states for all servers."""

    per_hour: float
    is_per_gpu: bool
    currency: str | None = None
    """``USD`` for ``$``, ``EUR`` for the euro sign, or as stated; None if none was."""

    def of_node(self, gpus_per_node: int) -> float:
        """Return the price of a server for one hour."""
        return self.per_hour * gpus_per_node if self.is_per_gpu else self.per_hour


_SIGNS = {"$": "USD", "\N{EURO SIGN}": "EUR", "\N{POUND SIGN}": "GBP"}
_STATED = re.compile(
    rf"^\s*([{''.join(_SIGNS)}])?\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]{{3}})?\s*/\s*(gpu|node|server)-?\s*(?:hour|hr|h)\s*$",
    re.IGNORECASE,
)


def parse_price(text: str) -> StatedPrice:
    """Read ``98/node-hour``, ``$2.10/gpu-hour`` or ``2.10 EUR/gpu-hour``. Raises SpecError for anything else."""
    match = _STATED.match(text)
    if match is None or not 0 < float(match[2]) <= MOST_PER_HOUR or (match[1] and match[3]):
        raise SpecError(f"price: {shown(text)} is not allowed; write it like '2.10/gpu-hour' or '98 EUR/node-hour'")
    currency = _SIGNS[match[1]] if match[1] else match[3] and match[3].upper()
    return StatedPrice(float(match[2]), match[4].lower() == "gpu", currency)
