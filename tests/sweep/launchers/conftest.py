"""A fork server for tests that start trials themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_bench.sweep.launchers.fork_server import ForkServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose trials may share a process."""
    folder = tmp_path_factory.mktemp("server")
    server = ForkServer(folder / "server.log", str(folder), resident=True)
    yield server
    server.close()
