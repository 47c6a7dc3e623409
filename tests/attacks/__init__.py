"""Random signals, damaged records and mutated input.

Each run of ``make test`` makes the same attacks; ``make validate`` makes many more, with a seed that it prints. In both
``ATTACKS=COUNT,SEED`` chooses: ``ATTACKS=10000,7 pytest tests/attacks/test_records.py``.
"""

import os
import random

from tests.profiles import draws


def count_and_seed(quick: int, validate: int) -> tuple[int, int]:
    """Return how many attacks a test makes in this run, and the seed from which they are drawn."""
    if asked := os.environ.get("ATTACKS"):
        count, seed = map(int, asked.split(","))
        return count, seed
    return draws(quick, validate), draws(1, random.SystemRandom().randrange(10**6))
