"""Matrix products under a power limit: the clock of P = static + a f V(f)^2, worked by hand."""

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import BUILT_IN, gpu
from fsdp_bench.rates.datasheet import datasheet, products_efficiency
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.setup import TrainSetup

H100 = gpu("H100-SXM")


def _seconds(one: Gpu, work: Work) -> float | None:
    return datasheet(Hardware.of_gpu(one), TrainSetup(world_size=1, sequence_length=2048)).run(work)


def test_at_a_constant_voltage_the_clock_falls_with_the_power_above_the_static_one() -> None:
    for watts in (650, 500, 350):
        fraction = (watts - 72) / (700 - 72)
        assert products_efficiency(H100.under_power(watts)) == pytest.approx(0.75 * fraction, rel=1e-6)
    assert products_efficiency(H100.under_power(700)) == products_efficiency(H100) == 0.75


def test_where_the_voltage_rises_with_the_clock_less_power_costs_less_speed() -> None:
    """Voltages 1 at 1 GHz and 1.5 at 1.5: f V^2 is 3.375 there, and 1 at 1 GHz: 1 / 3.375 of the power."""
    clock = replace(H100.power.clock, clock_mhz=1500, static_watts=100, voltage=((1000, 1.0), (1500, 1.5)))
    card = replace(H100, power=replace(H100.power, clock=clock))
    limit = 100 + 600 / 3.375
    assert products_efficiency(card.under_power(limit)) == pytest.approx(0.75 * 1000 / 1500, rel=2e-3)


def test_an_older_cublas_is_slower_only_where_its_power_is_below_the_limit() -> None:
    """At 500 W each FLOP takes its energy, whichever kernel computes it: both reach (500 - 72) / (700 - 72) of 0.75."""
    older = H100.with_cuda("12.1")
    assert products_efficiency(older) == pytest.approx(0.569)
    assert products_efficiency(older.under_power(500)) == pytest.approx(
        products_efficiency(H100.under_power(500)), rel=0.001
    )
    assert products_efficiency(H100.with_cuda("12.1").under_power(500)) == products_efficiency(
        H100.under_power(500).with_cuda("12.1")
    )


def test_an_a800_of_300_w_is_as_much_slower_than_one_of_400_w_as_was_measured() -> None:
    """248 of 278 TFLOP/s: A800 PCIe and SXM, 500 products of each size (zhuanlan.zhihu.com/p/13866293937, 2024)."""
    sxm = gpu("A800-SXM-80GB")
    assert products_efficiency(sxm.under_power(300)) / products_efficiency(sxm) == pytest.approx(248 / 278, rel=0.02)


def test_products_in_16_and_8_bits_slow_down_and_nothing_else_does() -> None:
    limited = H100.under_power(500)
    product = Work("aten::mm nn", 16384 * 16384 * 6, dims=(16384, 16384, 16384), itemsize=2)
    for work, ratio in (
        (product, 628 / 428),
        (replace(product, name="aten::mm nt", itemsize=1), 628 / 428),
        (replace(product, itemsize=4), 1.0),
        (Work("aten::copy_", 1 << 30), 1.0),
        (Work("aten::scaled_dot_product_attention", 1 << 20, dims=(2, 32, 32, 4096, 128), itemsize=2), 1.0),
    ):
        assert _seconds(limited, work) / _seconds(H100, work) == pytest.approx(ratio, rel=1e-3), work.name


def test_the_card_of_500_w_is_the_same_chip_at_500_w() -> None:
    card = gpu("H100-SXM-96GB")
    assert card.limit_watts == 500
    assert products_efficiency(card) == pytest.approx(products_efficiency(H100.under_power("500W")), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("H100-SXM", "500", "power: '500' has no unit of power; W or kW"),
        ("H100-SXM", "much", "power: 'much' is not a power; write it like '500W'"),
        ("H100-SXM", "900W", "power: 900 W is not allowed; 200 to 700 W on H100-SXM"),
        ("H100-SXM", "0.1kW", "power: 100 W is not allowed; 200 to 700 W"),
        ("B200", "800W", "power: 800 W is not allowed; how slow B200 is below its default of 1000 W is not known"),
        ("MI300X", "700W", "power: 700 W is not allowed; the default limit of MI300X is not known"),
    ],
)
def test_a_limit_that_cannot_be_or_whose_cost_is_unknown_is_refused(name: str, limit: str, message: str) -> None:
    with pytest.raises(SpecError, match="power: ") as error:
        gpu(name).under_power(limit)
    assert message in str(error.value)


def test_a_server_whose_documents_state_another_limit_has_it_unless_the_user_states_one() -> None:
    entry = BUILT_IN.server("p5.48xlarge")
    stated = replace(BUILT_IN.server("g5.48xlarge").gpu_power, watts=600)
    capped = replace(entry, gpu_power=stated)
    found = BUILT_IN.gpu_of(capped)
    assert (found.limit_watts, found.power_limit_source) == (600, stated.source)
    assert BUILT_IN.under_power("650W").gpu_of(capped).limit_watts == 650
    assert BUILT_IN.gpu_of(entry) == H100  # nothing is documented: the GPU's default
    assert BUILT_IN.gpu_of(BUILT_IN.server("g5.48xlarge")).power_limit_source is None  # documented, and the default
