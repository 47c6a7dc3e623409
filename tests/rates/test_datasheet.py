"""Rates of a datasheet: copies to and from the host, and the slowest of several GPUs, against drawn ones."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from fsdp_bench.catalog.loader import gpu, server, servers
from fsdp_bench.rates.datasheet import COPY_EFFICIENCY, SMALL_COPY_BYTES, SPREAD, datasheet, slowest_of
from fsdp_bench.simulate.events import Work
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.setup import TrainSetup

ALONE = datasheet(Hardware.of_gpu(gpu("H100-SXM")), TrainSetup(world_size=1, sequence_length=2048))


def test_without_a_known_link_a_small_copy_takes_as_long_as_on_the_slowest_and_a_large_one_is_unknown() -> None:
    links = [link for one in servers() if (link := one.host_link) is not None]
    rates = (
        COPY_EFFICIENCY * (link.bandwidth_bytes_per_second or 1e12) / (link.gpus_per_uplink or 1) for link in links
    )
    assert ALONE.copy(Work("to_host", SMALL_COPY_BYTES)) == SMALL_COPY_BYTES / min(rates)
    assert ALONE.copy(Work("to_host", SMALL_COPY_BYTES + 1)) is None


def test_a_known_link_decides_about_small_copies_too() -> None:
    linked = replace(ALONE, copy_bandwidth=1e9)
    assert linked.copy(Work("to_host", 4)) == 4e-9


@pytest.mark.parametrize(("num_gpus", "sharing"), [(1, 1), (2, 2), (8, 2)])
def test_only_gpus_that_are_used_share_an_uplink(num_gpus: int, sharing: int) -> None:
    """Two GPUs of a p4d share each uplink of 16 GB/s (servers.toml), of which copies reach 80 %."""
    cluster = Hardware(server=server("p4d.24xlarge"), gpu=gpu("A100-SXM-40GB"), num_nodes=1, gpus_per_node=num_gpus)
    rates = datasheet(cluster, TrainSetup(world_size=num_gpus, sequence_length=2048))
    assert rates.copy(Work("to_host", 2**30)) == pytest.approx(2**30 / (0.8 * 16e9 / sharing))


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_the_slowest_gpu_is_the_mean_of_the_slowest_of_drawn_ones(count: int) -> None:
    draw = random.Random(7)
    drawn = fmean(min(draw.gauss(1.0, SPREAD) for _ in range(count)) for _ in range(2000))
    assert slowest_of(count) == pytest.approx(drawn, abs=0.001)


def test_one_gpu_waits_for_nobody_and_more_never_wait_less() -> None:
    rates = [slowest_of(count) for count in range(1, 200)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
