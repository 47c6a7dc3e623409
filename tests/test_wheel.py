"""The wheel has every file of the package; ``make wheel`` installs one and tries its commands."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_that_is_not_python_is_in_the_wheel() -> None:
    package = ROOT / "fsdp_bench"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for pattern in settings["package-data"]["fsdp_bench"] for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == packed
