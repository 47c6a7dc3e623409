"""Shared by the tests of sweeps: the processes that have imported torch, and the results of one real sweep."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.grid import trials_of
from fsdp_bench.sweep.config.sweep_file import read_file, require_gpu
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import run_command, write_tiny_sweep
from tests.processes import Sweep
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


FIVE_TRIALS = """
world_size = 2
precision = 'bf16-mixed'
api = ['fsdp1', 'fsdp2']
micro_batch_size = [1, 512]

[[include]]
world_size = 1
api = 'fsdp1'
micro_batch_size = 1

[[exclude]]
api = 'fsdp2'
micro_batch_size = 512
reason = 'slow machine'
"""
"""Three trials that run, one that does not fit into the limit of the table below, one that is skipped."""

ALL_MEASUREMENTS = """
warmup_steps = 3
memory_limit = "2MiB"
communication_steps = 2
steps_without_communication = 2
"""


@pytest.fixture(scope="session")
def swept(server_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep of five trials that is done: its file, its results in m/tiny, its charts and traces.

    All tests of a worker read it; one that changes something changes ``copied``.
    """
    folder = tmp_path_factory.mktemp("swept")
    file = write_tiny_sweep(folder, FIVE_TRIALS, ALL_MEASUREMENTS)
    with SharedForkServer.instead_of_own(server_folder):
        done = run_command("sweep", file, "--results", folder, "--machine", "m", "--trace")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copied(swept: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(swept, tmp_path / "copy")


@pytest.fixture
def new_sweep(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    """Return a function that makes a Sweep of a grid, a run table and options; its processes end with the test."""
    made: list[Sweep] = []

    def make(grid: str, run: str = "", *options: object) -> Sweep:
        made.append(Sweep(write_tiny_sweep(tmp_path, grid, run), tmp_path / "results", *options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def resume(folder: Path) -> CompletedProcess[str]:
    """Run the sweep of a copy again."""
    return run_command("sweep", folder / "tiny.toml", "--results", folder, "--machine", "m", "--no-charts", "--trace")


def trial(folder: Path, **fields: object) -> TrialRecord:
    """Return the record of the only trial whose setup has these values."""
    (found,) = (
        record
        for record in read_records(folder)
        if all(getattr(record.setup, name) == value for name, value in fields.items())
    )
    return found


def read_sweep(path: Path, machine: Machine) -> tuple[Trial, ...]:
    """Read a sweep file and resolve it for this machine."""
    return trials_of(require_gpu(read_file(path, machine))).cells
