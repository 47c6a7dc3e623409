"""The slowest of several GPUs, against drawn ones."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from fsdp_bench.rates.datasheet import SPREAD, slowest_of


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_it_is_the_mean_of_the_slowest_of_drawn_gpus(count: int) -> None:
    draw = random.Random(7)
    drawn = fmean(min(draw.gauss(1.0, SPREAD) for _ in range(count)) for _ in range(2000))
    assert slowest_of(count) == pytest.approx(drawn, abs=0.001)


def test_one_gpu_waits_for_nobody_and_more_never_wait_less() -> None:
    rates = [slowest_of(count) for count in range(1, 200)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
