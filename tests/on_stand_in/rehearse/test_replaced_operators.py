"""The operators that dry runs and recordings replace, against PyTorch's own on the stand-in."""

from __future__ import annotations

import json

import pytest

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.train.dry_run.fake_world import fake_device
from tests.on_stand_in.interpreters import run_on_gpu
from tests.on_stand_in.rehearsing import SCRIPTS
from tests.on_stand_in.scripts import replaced_operators


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["H200", "T4"])
def test_replaced_operators_make_and_save_the_storages_of_pytorchs_own(name: str, every: int) -> None:
    expected = json.loads(run_on_gpu(name, (SCRIPTS / "replaced_operators.py").read_text(), str(every)))
    with fake_device("cuda", before_sm80=gpu(name).is_before_sm80) as device:
        found = replaced_operators.all_storages(device, every)
    assert found.keys() == expected.keys()
    differing = {name: (found[name], expected[name]) for name in expected if found[name] != expected[name]}
    assert not differing, f"{len(differing)} of {len(expected)}: {dict(list(differing.items())[:3])}"
