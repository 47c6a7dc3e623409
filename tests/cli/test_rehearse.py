"""``fsdp-bench rehearse``: which GPU the stand-in passes for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_bench.cli.main import cli
from fsdp_bench.plan import rehearse_command
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu


@pytest.mark.parametrize(("gpu", "name"), [("H100-SXM", "NVIDIA H100 80GB HBM3"), ("H100-SXM-96GB", "H100-SXM-96GB")])
def test_a_gpu_without_a_product_name_has_the_catalogue_s(
    gpu: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[RehearsedGpu] = []

    def instead(_command: Any, stand_in: RehearsedGpu, *_others: Any) -> Any:
        seen.append(stand_in)
        raise SpecError("enough")

    monkeypatch.setattr(rehearse_command, "rehearse", instead)
    (tmp_path / "train.py").touch()
    with pytest.raises(SpecError, match="enough"):
        cli.main(["rehearse", "--gpu", gpu, "--", sys.executable, str(tmp_path / "train.py")], standalone_mode=False)
    assert [one.product_name for one in seen] == [name]
