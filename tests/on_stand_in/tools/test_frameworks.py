"""Frameworks' own examples, unmodified: the peaks that docs/frameworks.md has."""

from pathlib import Path

import pytest

from fsdp_bench.spec.files import private_folder
from tests.on_stand_in.interpreters import TORCHES
from tools.frameworks.environment import Environments
from tools.frameworks.matrix import Framework, Row, read_matrix
from tools.frameworks.rehearsal import record_of, rehearse_row

ROWS = [(framework, row) for framework in read_matrix() for row in framework.rows if framework.of_row(row)]
IN_EVERY_CHANGE = (
    *("trl-sft-fsdp2", "trl-sft-adam8bit-fsdp1", "trl-dpo-lora-fsdp2", "trl-dpo-ddp", "trl-reward-fsdp2"),
)
"""Rows that need one environment, without a repository: FSDP2, FSDP1 and DDP, with PEFT and bitsandbytes."""

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("framework", "row"),
    [
        pytest.param(*one, id=one[1].name, marks=[] if one[1].name in IN_EVERY_CHANGE else pytest.mark.slow)
        for one in ROWS
    ],
)
def test_an_example_has_the_recorded_peak(framework: Framework, row: Row, tmp_path: Path) -> None:
    release = framework.of_row(row)[0]
    kept = private_folder("frameworks") or tmp_path
    pythons = {one.version.partition("+")[0]: Path(one.python) for one in TORCHES}
    if release.torch not in pythons:
        pytest.skip(f"torch {release.torch} is not here: FSDP_BENCH_TEST_CUDA_PYTHONS names interpreters")
    places = Environments(kept, pythons)
    found = rehearse_row(framework, row, release, row.gpus[0], places)
    recorded = next(run for run in record_of(framework, row).runs if run.gpus == row.gpus[0])
    assert (found.answer, found.why) == (recorded.answer, recorded.why)
    assert found.peak_allocated_bytes == recorded.peak_allocated_bytes
    assert found.peak_reserved_bytes == recorded.peak_reserved_bytes
