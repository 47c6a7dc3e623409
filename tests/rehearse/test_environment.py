"""The environment in which rehearsed trials run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsdp_bench.rehearse import environment
from fsdp_bench.rehearse.find_torch import Torch
from fsdp_bench.spec.codec import to_json
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu


def test_it_says_what_the_gpu_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = Torch("python", "2.13.0+cu130", "13.0", tmp_path)
    monkeypatch.setattr(environment, "find_torch", lambda python: torch)
    monkeypatch.setattr(environment, "build_stand_in", lambda found, otherwise: tmp_path)
    gpu = rehearsed_gpu("A10G", "1GiB")
    found = environment.environment_of(gpu)
    assert found["STAND_IN_NAME"] == "NVIDIA A10G"
    assert int(found["STAND_IN_BYTES"]) == 22587 << 20  # the catalogue's
    assert int(found["STAND_IN_CONTEXT_BYTES"]) == 1 << 30
    assert (found["STAND_IN_CAPABILITY"], found["STAND_IN_MULTIPROCESSORS"]) == ("86", "80")
    assert found["LD_PRELOAD"].startswith(str(tmp_path))


def test_what_prevents_a_rehearsal_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(sys, "argv", ["environment", to_json(rehearsed_gpu("A10G")).decode(), "/nowhere"])
    monkeypatch.setattr(environment, "environment_of", lambda gpu, otherwise: environment.find_torch("/nowhere/python"))
    environment.main()
    assert "cannot run /nowhere/python to look for torch" in capsys.readouterr().out
