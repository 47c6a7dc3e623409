"""What holds for all tests that run torch in pytest's own process."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute with one thread: several that wait for each other at tiny operators take ten times the CPU time."""
    torch.set_num_threads(1)
