"""Imports go in one direction, every package lists its files, and the wheel has all of them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

from fsdp_bench.spec.errors import install_hint
from fsdp_bench.spec.subprocesses.own_python import own_python

PACKAGE = Path(__file__).parents[1] / "fsdp_bench"
TOOLS = PACKAGE.parent / "tools"
FOLDERS = sorted(path.parent for root in (PACKAGE, TOOLS) for path in root.glob("**/__init__.py"))[1:]


def test_imports_go_in_one_direction() -> None:
    words = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions count, too."""
    graph = grimp.build_graph("fsdp_bench", cache_dir=None)
    uses = {module: graph.find_upstream_modules(module) for module in graph.modules}
    circles = {frozenset({one, *(other for other in uses[one] if one in uses[other])}) for one in uses}
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_package_lists_its_files(folder: Path) -> None:
    text = (folder / "__init__.py").read_text().split('"""')[1]
    entries = {path.name for path in folder.iterdir() if path.suffix in (".py", ".toml", ".csv")} - {"__init__.py"}
    entries |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    data = {f"{path.name}/" for path in folder.iterdir() if path.is_dir()}
    assert {entry for entry in entries if not re.search(rf"(^|[ `]){re.escape(entry)}", text, re.MULTILINE)} == set()
    assert set(re.findall(r"^    ([\w.]+/?)  ", text, re.MULTILINE)) <= entries | data


def test_every_python_of_ours_is_started_without_the_current_folder() -> None:
    """By own_python(), but for those that become the user's (-I); build.py asks its own for torch."""
    named = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text()}
    assert named == {"spec/subprocesses/own_python.py", "rehearse/run.py", "rehearse/prepared.py", "rehearse/build.py"}
    assert "-P" in own_python("module")
    for file in ("run.py", "prepared.py"):
        assert '[sys.executable, "-I", "-S", str(ENTER)' in (PACKAGE / "rehearse" / file).read_text()


def test_nobody_is_told_to_install_a_package_of_our_name_from_a_registry() -> None:
    """No registry has it, so that anyone could register it: hints install from the clone."""
    pages = [PACKAGE.parent / "README.md", *(PACKAGE.parent / "docs").glob("*.md"), *PACKAGE.rglob("*.py")]
    told = re.compile(r"pip install (-\S+ )*['\"]?fsdp[-_]bench")
    assert [path.name for path in pages if told.search(path.read_text())] == []
    assert install_hint("hf") in (
        "pip install 'accelerate>=1.0' 'peft>=0.14' 'transformers>=4.50'",
        "pip install '.[hf]' in the clone of fsdp-bench",  # where only the sources are on Python's path
    )


def test_every_file_that_is_not_python_is_in_the_wheel() -> None:
    """``make wheel`` installs one and tries its commands."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed = {path for pattern in settings["package-data"]["fsdp_bench"] for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")}
    assert files == packed
