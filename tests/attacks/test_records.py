"""A run of the driver that damages results."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attacks.records import every_truncation, run
from tests.profiles import draws

COUNT = draws(120, 5000)
SEED = draws(1, random.SystemRandom().randrange(10**6))


@pytest.mark.timeout(COUNT * 2 + 300)
def test_results_that_are_damaged_anyhow_are_read_as_far_as_they_are_whole() -> None:
    print(f"seed {SEED}")
    counts, failures = run(COUNT, SEED)
    assert not failures, failures[0]
    assert counts["set aside"] > COUNT / 5  # the damage is real
    assert counts["read"] > COUNT / 10


def test_no_part_of_a_record_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    assert every_truncation(tmp_path) == 0
