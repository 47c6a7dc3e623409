"""The tests that need a GPU, but neither NCCL nor time, and the guide's rehearsals pass on the stand-in, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_bench.rehearse.build import environment_of
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu
from tests.docs.pages import CUDA_BUILD, ROOT, run_page

pytestmark = [pytest.mark.timeout(290)]

TESTS = Path(__file__).parents[2] / "gpu"


SOME = "not 6 and not 9 and not trials and not largest"  # one seed; and sweep/test_rehearsal.py finds the largest


@pytest.mark.parametrize("chosen", [SOME, pytest.param("", marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_tests_for_a_gpu_pass_on_one_that_is_never_behind(chosen: str) -> None:
    """Where every event has happened by the time that anybody asks, as the tests of the allocator expect."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, str(TESTS)],
        cwd=TESTS.parents[1],
        env={**os.environ, **environment_of(rehearsed_gpu("H200")), "STAND_IN_PROGRESS": "idle", "CPU_TIMES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["rehearse", "check"])
def test_the_guides_rehearsals_print_what_it_says(name: str, tmp_path: Path) -> None:
    """Where outputs changed on purpose: ``python -m tests.docs.update --rehearsals docs/guide/rehearse.md``."""
    page = f"docs/guide/{name}.md"
    result = run_page((ROOT / page).read_text(), page, tmp_path, CUDA_BUILD)
    assert result.num_run >= 2
    assert not result.failures, "\n\n".join(result.failures)
