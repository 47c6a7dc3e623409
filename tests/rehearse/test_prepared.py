"""Which rehearsals may be forks of the same process. The processes themselves: tests/on_stand_in/rehearse."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fsdp_bench.rehearse import prepared
from fsdp_bench.rehearse.prepared import MOST_PROCESSES, PreparedPython

ENVIRONMENT = {"PATH": "/bin", "STAND_IN_CAPABILITY": "90", "STAND_IN_BYTES": "80"}


class _Process:
    """Takes the place of a process; ``can_import``: whether it can still be forked after that."""

    can_import = True

    def __init__(
        self, folder: Path, python: Sequence[str], environment: Mapping[str, str], modules: Sequence[str] | None
    ) -> None:
        self.modules, self.error, self.num_running, self.has_ended = modules, None, 0, False

    def import_modules(self) -> bool:
        return self.can_import or self.modules == ()

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "ForkServer", _Process)


def test_a_process_serves_one_script_in_one_environment_on_gpus_of_one_generation() -> None:
    with PreparedPython() as python:
        first = python.server(["python"], "train.py", ENVIRONMENT)
        assert python.server(["python"], "train.py", {**ENVIRONMENT, "STAND_IN_BYTES": "141"}) is first
        for others in (
            (["python", "-O"], "train.py", ENVIRONMENT),
            (["python"], "other.py", ENVIRONMENT),
            (["python"], "train.py", {**ENVIRONMENT, "STAND_IN_CAPABILITY": "80"}),
            (["python"], "train.py", {**ENVIRONMENT, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ):
            assert python.server(*others) is not first
    assert first is not None
    assert first.has_ended


def test_processes_beyond_a_few_end_unless_a_rehearsal_runs_in_them() -> None:
    with PreparedPython() as python:
        busy, unused, *_others = [python.server(["python"], number, ENVIRONMENT) for number in range(2)]
        busy.num_running = 1
        for number in range(MOST_PROCESSES):
            python.server(["python"], f"further {number}", ENVIRONMENT)
        assert (busy.has_ended, unused.has_ended) == (False, True)


def test_a_process_that_imports_make_useless_is_replaced_by_one_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Process, "can_import", False)
    with PreparedPython() as python:
        found = python.server(["python"], "train.py", ENVIRONMENT)
        assert found.modules == ()
        assert python.server(["python"], "train.py", ENVIRONMENT) is found
