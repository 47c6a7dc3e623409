"""The number of threads of torch in pytest's own process."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute with one thread: several, which wait for each other at tiny operators, take ten times the CPU time."""
    torch.set_num_threads(1)
