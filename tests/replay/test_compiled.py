"""The compiled allocator against the same functions in Python. Compiling replaces them in the whole process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.replay.caching_allocator import compiled, heap, sizes

READINGS = """
import sys
from hypothesis import HealthCheck, given, settings, seed
from hypothesis import strategies as st
from fsdp_bench.replay.caching_allocator.compiled import compile_allocator
from fsdp_bench.replay.caching_allocator.program import program
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.simulate.step import first_steps
from tools.validate.random_setups import draw_cells
from tests.replay.replaying import replay
from tests.replay.test_allocator import STEPS, MIB, events_from

if sys.argv[1] == "compiled":
    compile_allocator()

@seed(7)
@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.one_of(st.none(), st.integers(0, 200)), st.booleans())
def read(steps, mib, expandable):
    limit = None if mib is None else mib * MIB
    print(replay(events_from(steps), limit, expandable))

read()
for cell in draw_cells(6, seed=5, device="cuda"):
    log = first_steps(cell.model, cell.setup, CUDA)
    if program(log) is None:
        continue
    whole = replay(log, seconds=1e-4)
    print(whole, replay(log, int(0.9 * whole.peak_reserved_bytes), seconds=1e-4), replay(log, None, True))
# More blocks than a replay begins with room for.
print(replay(events_from([(0, 1000 * (index + 1), 0) for index in range(3000)])))
print("numba" in sys.modules, file=sys.stderr)
"""


def readings(how: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if cache is None else {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", READINGS, how]
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True)


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}


def test_the_compiled_allocator_gives_the_readings_of_the_interpreted_one() -> None:
    """With the user's cache, because compiling takes ten seconds."""
    plain, first = readings("plain"), readings("compiled")
    assert first.stdout == plain.stdout
    assert plain.stdout.count("AllocatorReading") > 80
    assert (plain.stderr.split()[-1], first.stderr.split()[-1]) == ("False", "True")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [None, "cut", "zeros", "a folder"])
def test_every_compiled_function_is_kept_and_compiled_anew_where_its_file_is_damaged(
    damage: str | None, tmp_path: Path
) -> None:
    first = readings("compiled", tmp_path)
    kept = _files(tmp_path)
    assert kept
    for path in kept:
        if damage == "cut":
            path.write_bytes(path.read_bytes()[:100])
        elif damage == "zeros":
            path.write_bytes(bytes(path.stat().st_size))
        elif damage == "a folder":
            path.unlink()
            path.mkdir()
    assert readings("compiled", tmp_path).stdout == first.stdout
    assert (_files(tmp_path) == kept) == (damage is None)
    assert readings("compiled", tmp_path).stdout == first.stdout


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """A function that compiles one module, which takes a second, as in a new process, and returns kSmallBuffer."""
    import numba

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(vars(numba.config), "CACHE_DIR", "")
    monkeypatch.setattr(compiled, "_MODULES", (sizes,))
    monkeypatch.setattr(compiled.execution, "execute", lambda *_: sizes.segment_bytes(1000))
    plain = {name: getattr(value, "py_func", value) for name, value in vars(sizes).items() if callable(value)}

    def compile_again() -> int:
        for name, function in plain.items():
            monkeypatch.setattr(sizes, name, function)
        compiled.compile_allocator.__wrapped__()
        assert sizes.segment_bytes is not plain["segment_bytes"]
        return sizes.segment_bytes(1000)

    return compile_again


def test_a_compiled_function_is_kept_in_a_folder_that_only_the_user_may_write(
    compiling: Callable[[], int], tmp_path: Path
) -> None:
    assert compiling() == 2 * 2**20
    kept = _files(tmp_path)
    assert kept
    assert compiling() == 2 * 2**20
    assert _files(tmp_path) == kept
    (folder,) = (tmp_path / "fsdp-bench").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_cut_file_of_the_cache_is_compiled_anew(compiling: Callable[[], int], tmp_path: Path) -> None:
    compiling()
    (damaged,) = _files(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert compiling() == 2 * 2**20
    assert damaged.stat().st_size > 100


def test_a_file_that_others_may_have_put_into_the_cache_is_not_read(
    compiling: Callable[[], int], tmp_path: Path
) -> None:
    """A file of numba's cache is a pickle: reading it runs what it says."""
    compiling()
    (index,) = tmp_path.rglob("*.nbi")
    forged = f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR."
    index.write_bytes(forged.encode())
    folder = index.parents[1]
    folder.chmod(0o777)
    assert compiling() == 2 * 2**20
    assert not (tmp_path / "ran").exists()
    assert folder.stat().st_mode & 0o777 == 0o777
    assert index.read_bytes() == forged.encode()


@pytest.mark.parametrize("broken", ["full", "no folder"])
def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    broken: str, compiling: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba.core.caching import IndexDataCacheFile

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if broken == "full":
        monkeypatch.setattr(IndexDataCacheFile, "save", full)
    else:
        for name in ("fsdp-bench", f"fsdp-bench-{os.geteuid()}"):
            (tmp_path / name).touch()
    assert compiling() == 2 * 2**20
    assert not _files(tmp_path)


def test_changed_sources_have_another_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = compiled._cache_name()
    changed = tmp_path / "heap.py"
    changed.write_text(Path(str(heap.__file__)).read_text() + "\n# changed\n")
    monkeypatch.setattr(heap, "__file__", str(changed))
    assert compiled._cache_name() != before
    assert not compiled.is_kept()


@pytest.mark.parametrize(("kept", "enough"), [(True, compiled.LOAD_AFTER), (False, compiled.COMPILE_AFTER)])
def test_a_process_compiles_once_it_has_replayed_enough(
    kept: bool, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(compiled, "_num_replayed", 0)
    monkeypatch.setattr(compiled, "is_kept", lambda: kept)
    monkeypatch.setattr(compiled, "compile_allocator", lambda: calls.append(None))
    for _ in range(4):
        compiled.compile_if_much_is_replayed(enough // 4)
    assert not calls
    compiled.compile_if_much_is_replayed(1)
    assert calls
