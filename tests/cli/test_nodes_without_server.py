"""Nodes of a GPU without a server: eight GPUs per node are assumed, and a note says so."""

from __future__ import annotations

import pytest

from fsdp_bench.cli.common.options import SetupOptions
from fsdp_bench.cli.common.setups import read_setups


def test_eight_gpus_a_node_are_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, setup, _),) = read_setups(SetupOptions(gpu="H100-SXM", nodes=4))
    assert setup.world_size == 32
    assert capsys.readouterr().err == "note: 8 GPUs on each node are assumed; --gpus-per-node says how many\n"


def test_nothing_is_assumed_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for words, world in (
        (SetupOptions(gpu="H100-SXM", nodes=4, gpus_per_node=2), 8),
        (SetupOptions(gpu="H100-SXM"), 1),
        (SetupOptions(server="p5.48xlarge", nodes=2), 16),
    ):
        ((_, setup, _),) = read_setups(words)
        assert setup.world_size == world
    assert capsys.readouterr().err == ""
