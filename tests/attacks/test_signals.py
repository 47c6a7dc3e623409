"""A run of the driver that sends signals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attacks import count_and_seed
from tests.attacks.signals import SWEEPS, attack

COUNT, SEED = count_and_seed(2, 10)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[pytest.mark.slow] * (name != "fork")) for name in SWEEPS]
)
def test_a_sweep_attacked_at_random_moments_ends_with_every_record_once(launcher: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    failures = attack(launcher, COUNT, SEED, tmp_path)
    assert not failures, failures[0]
