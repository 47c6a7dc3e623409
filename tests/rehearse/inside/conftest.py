"""A folder with a script that writes its environment, and what real launchers give to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITE_ENVIRONMENT = """
import json, os
with open(f"environment_{os.environ.get('RANK', 'alone')}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""
OF_LAUNCHERS = ("PET_", "TORCH", "OMP_", "NCCL", "ACCELERATE", "FSDP_", "PARALLELISM_")


DIFFERS_IN_EACH_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
"""torchrun takes this host's name, a free port and a random id on one node."""
OF_THE_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE"}
"""Variables by which the agent and its workers talk to each other; there is no agent here."""


@pytest.fixture(autouse=True)
def _folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(WRITE_ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    for name in [name for name in os.environ if name.startswith(OF_LAUNCHERS)]:
        monkeypatch.delenv(name)


def given_by(module: str, *words: str, rank: str = "0") -> dict[str, str]:
    """Return the variables that a launcher's process adds to this one's, by really starting it."""
    environment = dict(os.environ)  # and nothing that C libraries have set beside it
    line = [sys.executable, "-m", module, *words]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = json.loads(Path(f"environment_{rank}.json").read_text())
    return {name: value for name, value in given.items() if environment.get(name) != value}


def assert_given(ours: dict[str, str], given: dict[str, str]) -> None:
    """Compare what a rank is given here with what a launcher's own process was given: the same, and nothing more."""
    same = given.keys() - OF_THE_AGENT - DIFFERS_IN_EACH_RUN
    assert {name: ours.get(name) for name in same} == {name: given[name] for name in same}
    assert ours.keys() - given.keys() <= {"NODE_RANK", *OF_THE_AGENT}
