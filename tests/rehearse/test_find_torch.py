"""The torch that an interpreter would import, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_bench.rehearse.find_torch import ASKED, find_torch
from fsdp_bench.spec.errors import MachineError
from tests.conftest import message_of


def interpreter(folder: Path, *, version: str | None, cuda: str | None = None, platform: str = "linux-x86_64") -> str:
    """Write a stand-in for an interpreter that answers as one with that torch would; None: without torch."""
    torch = folder / "site" / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(
        "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n"
        f"__version__ = {version!r}\ndebug = False\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    if cuda:
        (torch / "lib" / "libtorch_cuda.so").touch()
    python = folder / "python"
    answer = json.dumps([platform, str(torch) if version else None])
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(("cuda", "number"), [("12.4", 12040), ("12.8", 12080), ("13.0", 13000)])
def test_the_cuda_build_is_found_with_cudas_version_as_nvidia_counts_it(tmp_path: Path, cuda: str, number: int) -> None:
    torch = find_torch(interpreter(tmp_path, version="2.9.1+cu", cuda=cuda))
    assert (torch.version, torch.cuda, torch.cuda_version) == ("2.9.1+cu", cuda, number)
    assert torch.folder == tmp_path / "site" / "torch"


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ({"version": None}, "has no torch; install its CUDA build"),
        ({"version": "2.13.0+cpu"}, "built without CUDA; install the CUDA build"),
        ({"version": "2.3.1+cu121", "cuda": "12.1"}, "rehearse needs 2.4 or newer"),
        ({"version": "2.13.0", "platform": "macosx-14-arm64"}, "linux-x86_64 alone"),
        ({"version": "2.13.0+cu130", "cuda": "13.0", "platform": "linux-aarch64"}, "linux-x86_64 alone"),
        ({"version": "strange", "cuda": "13.0"}, "has torch strange"),
    ],
)
def test_a_torch_that_will_not_do_is_one_line(tmp_path: Path, torch: dict[str, str], said: str) -> None:
    assert said in message_of(lambda: find_torch(interpreter(tmp_path, **torch)), MachineError)


def test_no_interpreter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot run .*nowhere"):
        find_torch(str(tmp_path / "nowhere"))
    with pytest.raises(MachineError, match="no Python interpreter that works"):
        find_torch("/bin/false")


def test_a_real_interpreter_is_asked_without_importing_torch() -> None:
    ran = subprocess.run([sys.executable, "-X", "importtime", "-c", ASKED], capture_output=True, text=True, check=True)
    assert " torch" not in ran.stderr
    assert len(json.loads(ran.stdout)) == 2


def test_modules_of_the_current_folder_are_not_run_to_find_torch(tmp_path: Path) -> None:
    """The command itself would not import them: a script's folder is on Python's path, and not the current one."""
    for name in ("json", "sysconfig", "importlib", "torch"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    ran = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert len(json.loads(ran.stdout)) == 2
    assert not (tmp_path / "ran").exists()
