"""The operators that dry runs and recordings replace, against PyTorch's own on the stand-in."""

from __future__ import annotations

import json

import pytest

from fsdp_bench.train.dry_run.fake_world import fake_device
from tests.on_stand_in.interpreters import run_on_gpu
from tests.on_stand_in.rehearsing import SCRIPTS
from tests.on_stand_in.scripts import replaced_operators


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_replaced_operators_make_and_save_the_storages_of_pytorchs_own(every: int) -> None:
    expected = json.loads(run_on_gpu("H200", (SCRIPTS / "replaced_operators.py").read_text(), str(every)))
    with fake_device("cuda") as device:
        found = replaced_operators.all_storages(device, every)
    assert found.keys() == expected.keys()
    differing = {name: (found[name], expected[name]) for name in expected if found[name] != expected[name]}
    assert not differing, f"{len(differing)} of {len(expected)}: {dict(list(differing.items())[:3])}"
