"""The plugin that counts CPU seconds, in pytest runs of its own.

Tests in these runs repeat the plugin's loop, so that they take the same share of a budget on every machine.
"""

from pathlib import Path

import pytest

from tests.cpu_time import Budget, folder_of

ROOT = Path(__file__).parents[1]
WORK = """
import subprocess, sys
from tests.cpu_time import loop_seconds

def test_it_works():
    for _ in range({loops}):
        loop_seconds()

def test_a_process_works():
    loops = "from tests.cpu_time import loop_seconds; [loop_seconds() for _ in range({in_process})]"
    subprocess.run([sys.executable, "-c", loops], check=True)
"""
BUDGETS = """
loop_seconds = 1
[quick]
each_test = {each_test}
[quick.folders]
busy = 20
collection = 1000
"session fixtures" = 1000
[quick.longer_tests]
"""


def run(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    loops: int = 5,
    in_process: int = 5,
    each_test: int = 1000,
) -> pytest.RunResult:
    """Run two tests in a folder whose budget is 20 loops; 1.5 times as many, 30, are allowed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder := pytester.path / "tests" / "busy").mkdir(parents=True)
    (folder / "test_work.py").write_text(WORK.format(loops=loops, in_process=in_process))
    (pytester.path / "tests" / "budgets.toml").write_text(BUDGETS.format(each_test=each_test))
    return pytester.runpytest_subprocess("-p", "tests.cpu_time", "--budget=quick", *words)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_a_run_within_its_budget_passes_and_prints_the_seconds_of_each_folder(
    workers: tuple[str, ...], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(pytester, monkeypatch, *workers)
    done.stdout.fnmatch_lines(["* of * busy", "*in all*load*the loop took*", "*tests/busy/test_work.py::test_it_works"])
    assert done.ret == 0


FOLDER = "busy: * CPU seconds, at most * allowed"
TEST = "busy: tests/busy/test_work.py::test_it_works took * CPU seconds, at most * allowed"


@pytest.mark.parametrize(
    ("work", "line"),
    [
        pytest.param({"loops": 45}, FOLDER, marks=pytest.mark.slow),
        ({"in_process": 45}, FOLDER),
        ({"loops": 15, "in_process": 0, "each_test": 5}, TEST),
    ],
    ids=["a folder's own work", "a process that it starts", "a test within its folder's budget"],
)
def test_what_exceeds_its_budget_fails_the_run_and_is_named(
    work: dict[str, int], line: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 loops and the other test's 5, where 30 are allowed; 15 in one test, where 7.5 are."""
    done = run(pytester, monkeypatch, **work)
    done.stdout.fnmatch_lines([line])
    assert done.ret == 1


def test_budgets_are_scaled_by_the_loop_and_a_folder_without_a_row_may_take_nothing() -> None:
    """By hand: 1.5 times the row are allowed, and twice that where the loop takes twice as long."""
    budget = Budget(
        0.02, {"plan": 10.0, "cli": 400.0}, each_test=100.0, longer_tests={"tests/cli/test_a.py::one": 300.0}
    )

    def excesses(loop: float = 0.02, **seconds: float) -> list[str]:
        return list(budget.excesses({f"tests/{test}": taken for test, taken in seconds.items()}, loop))

    tests = {"plan/test_a.py::one": 25.0, "plan/test_a.py::two": 4.0}
    assert excesses(**tests) == ["plan: 29 CPU seconds, at most 15 allowed"]
    assert excesses(0.04, **tests) == []  # a machine of half the speed: 30 are allowed
    assert excesses(**{"new/test_a.py::one": 1.0}) == ["new: 1 CPU seconds, at most 0 allowed"]
    assert excesses(**{"cli/test_a.py::one": 400.0}) == []
    assert len(excesses(**{"cli/test_a.py::two": 400.0})) == 1


def test_a_file_outside_of_folders_and_what_is_no_test_have_their_own_rows() -> None:
    assert folder_of("tests/test_notebooks.py::test_it[a/b]") == "test_notebooks.py"
    assert folder_of("tests/plan/search/test_search.py::test_it") == "plan"
    assert folder_of("tests/on_stand_in/plan/test_exported_scripts.py::test_it") == "on_stand_in/plan"
    assert folder_of("session fixtures") == "session fixtures"
