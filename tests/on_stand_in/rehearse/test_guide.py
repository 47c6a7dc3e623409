"""The rehearsals that the guide shows run, and print what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import CUDA_BUILD, ROOT, run_page

PAGE = "docs/guide/rehearse.md"


@pytest.mark.timeout(300)
def test_the_guides_rehearsals_print_what_it_says(tmp_path: Path) -> None:
    """Where outputs changed on purpose: ``python -m tests.docs.update --rehearsals docs/guide/rehearse.md``."""
    result = run_page((ROOT / PAGE).read_text(), PAGE, tmp_path, CUDA_BUILD)
    assert result.num_run >= 2
    assert not result.failures, "\n\n".join(result.failures)
