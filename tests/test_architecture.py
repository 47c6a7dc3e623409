"""The house: imports go in one direction."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_imports_go_in_one_direction() -> None:
    words = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout
