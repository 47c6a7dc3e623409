"""Values in a question to ``plan``: durations, money, tokens, prices, numbers of nodes."""

from datetime import date

import pytest

from fsdp_bench.catalog.loader import BUILT_IN, prices
from fsdp_bench.catalog.user_file import read_entries
from fsdp_bench.cli.plan import parse_nodes
from fsdp_bench.plan.purchase.goal import parse_duration, parse_money, parse_tokens
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Source
from fsdp_bench.spec.price import Price, StatedPrice, Tariff, parse_price
from tests.conftest import message_of

SOURCE = Source(title="a bill", date="2026-01-01")


def test_durations_money_tokens_prices_and_nodes() -> None:
    for text, seconds in (("30d", 2_592_000), ("12h", 43_200), ("1.5 weeks", 907_200)):
        assert parse_duration(text) == seconds
    assert parse_nodes("1,2,8-10") == [1, 2, 8, 9, 10]
    assert parse_money("$200k") == 200_000
    assert (parse_tokens("4M-tokens", "global-batch"), parse_tokens("1T", "tokens")) == (4 * 10**6, 10**12)
    assert parse_price("2.10/gpu-hour") == StatedPrice(2.1, True)
    assert parse_price("$2.10/gpu-hour") == parse_price("2.10 usd/gpu-hour") == StatedPrice(2.1, True, "USD")
    assert parse_price("98 EUR/node-hour") == StatedPrice(98.0, False, "EUR")
    assert parse_price("98/node-hour").of_node(8) == 98
    assert parse_price("2/gpu-h").of_node(8) == 16


@pytest.mark.parametrize(
    ("function", "text", "part"),
    [
        (parse_duration, "soon", "write it like '30d'"),
        (parse_duration, "0d", "write it like '30d'"),
        (parse_money, "lots", "write it like '200k'"),
        (parse_price, "2.10", "write it like '2.10/gpu-hour'"),
        (parse_price, "0/gpu-hour", "write it like"),
        (parse_price, "$2.10 EUR/gpu-hour", "write it like"),
        (parse_nodes, "1-", "write it like"),
        (parse_nodes, "0", "1 to 512"),
        (parse_nodes, "9-3", "the smaller number first: '3-9'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(function: object, text: str, part: str) -> None:
    assert part in message_of(lambda: function(text))


def test_a_server_of_ones_own_costs_its_purchase_over_its_years_and_its_electricity() -> None:
    price = Price(server="x", source=SOURCE, purchase=263_000, years_of_use=3, electricity_per_kwh=0.2)
    per_hour = price.per_hour(Tariff.SPOT, watts=10_000)
    assert per_hour == pytest.approx(263_000 / (3 * 365.25 * 24) + 10 * 0.2)
    assert price.per_hour(Tariff.SPOT) is None  # its power is not known
    assert price.source.age_days(date(2026, 1, 11)) == 10


def test_prices_name_servers_of_the_catalogue_and_a_missing_one_is_none() -> None:
    for price in prices():
        assert BUILT_IN.server(price.server).name == price.server
        assert price.per_hour(Tariff.ON_DEMAND)
        assert price.source.date > "2025"
        for less in (price.reserved_per_hour, price.spot_per_hour):
            assert less is None or less < (price.on_demand_per_hour or 0)
    assert BUILT_IN.price(BUILT_IN.server("DGX-H100")) is None
    assert prices()[0].per_hour(Tariff.SPOT) is None


def test_a_price_without_a_price_is_refused() -> None:
    with pytest.raises(SpecError, match="has no price; on_demand_per_hour"):
        read_entries([{"server": "x", "source": {"title": "t", "date": "2026"}}], Price, "mine.toml: [[price]]")
