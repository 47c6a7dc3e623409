"""A short run of the driver that sends signals; FSDP_BENCH_TEST_MOMENTS makes it a long one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.attacks.signals import SWEEPS, attack

COUNT = int(os.environ.get("FSDP_BENCH_TEST_MOMENTS", "6"))
SEED = int(os.environ.get("FSDP_BENCH_TEST_SEED", random.SystemRandom().randrange(10**6)))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("launcher", SWEEPS)
def test_a_sweep_attacked_at_random_moments_ends_with_every_record_once(launcher: str, tmp_path: Path) -> None:
    print(f"seed {SEED}: FSDP_BENCH_TEST_SEED repeats this draw")
    failures = attack([launcher], COUNT // len(SWEEPS), SEED, tmp_path, print)
    assert not failures, failures[0]
