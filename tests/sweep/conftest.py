"""The processes that have imported torch, which the tests of sweeps share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.shared_processes import SharedForkServer, descriptions_in_forks


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the shared server, which ends with the tests."""
    yield tmp_path_factory.mktemp("server")
    SharedForkServer.end()


@pytest.fixture(scope="module", autouse=True)
def shared_processes(server_folder: Path) -> Iterator[None]:
    """Fork ranks, and processes that describe models' code, from processes that have imported torch."""
    with SharedForkServer.instead_of_own(server_folder), descriptions_in_forks():
        yield
