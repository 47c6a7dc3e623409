"""What the tests of sweeps share: the processes that have imported torch."""

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
    """Have ranks of sweeps inside this process, and descriptions of models' code, forked where torch is imported."""
    with SharedForkServer.instead_of_own(server_folder), descriptions_in_forks():
        yield
