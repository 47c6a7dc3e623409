"""The compiled replay against the same functions uncompiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.replay import compiled, malloc
from fsdp_bench.replay.allocator import Run, replay
from fsdp_bench.replay.compiled import compiled_run, kept_in
from fsdp_bench.simulate import step
from fsdp_bench.simulate.events import Event, Kind
from fsdp_bench.simulate.operators.kernels import CUDA
from fsdp_bench.validate.random_setups import Cell, draw_cells
from tests.conftest import simulating
from tests.replay.test_allocator import MIB, STEPS, events_from

CELLS = [cell for cell in draw_cells(60, seed=5, device="cuda") if cell.model.head_dim % 4 == 0]


@given(STEPS, st.one_of(st.none(), st.integers(0, 200)), st.booleans(), st.booleans(), st.booleans())
def test_random_events_read_the_same(
    steps: list[tuple[int, int, int]], card_mib: int | None, expandable: bool, ahead: bool, pace: bool
) -> None:
    events = events_from(steps)
    card_bytes = None if card_mib is None else card_mib * MIB
    plain, fast = (
        replay(events, card_bytes, expandable, host_runs_ahead=ahead, streams_keep_pace=pace, **run)
        for run in ({}, {"run": compiled_run()})
    )
    assert plain == fast


@simulating
@given(st.sampled_from(CELLS), st.floats(0.7, 1.1), st.booleans())
def test_programs_read_the_same_with_and_without_room(cell: Cell, share: float, expandable: bool) -> None:
    program = step.first_steps(replace(cell.model, num_hidden_layers=9), cell.setup, CUDA)
    needed = replay(program, None, expandable).peak_reserved_bytes
    card_bytes = int(share * needed)
    assert replay(program, card_bytes, expandable) == replay(program, card_bytes, expandable, run=compiled_run())


def test_more_blocks_than_a_replay_begins_with_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_from([(0, 1000 * (index + 1), 0) for index in range(200)])
    expected = replay(events)
    monkeypatch.setattr("fsdp_bench.replay.allocator.CAPACITY", 16)
    assert replay(events) == replay(events, run=compiled_run()) == expected


@pytest.mark.parametrize("run", [malloc.run, compiled_run()], ids=["plain", "compiled"])
def test_a_tensor_that_is_not_alive_is_not_freed(run: Run) -> None:
    events = [Event(Kind.ALLOCATE, 0, 512), Event(Kind.FREE, 0, 512), Event(Kind.FREE, 0, 512)]
    with pytest.raises(KeyError, match="a tensor that is not alive"):
        replay(events, run=run)


def run_compiling(cache: Path) -> list[str]:
    """Have a new process compile or load the replay; return whether it agrees, is kept and needed numba."""
    code = (
        "import sys;"
        "from fsdp_bench.replay.allocator import replay;"
        "from fsdp_bench.replay.compiled import compiled_run, is_kept;"
        "print(replay((), run=compiled_run()) == replay(()), is_kept(), 'numba' in sys.modules)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    return done.stdout.split()


def test_it_is_compiled_once_for_all_processes_and_then_needs_no_numba(tmp_path: Path) -> None:
    """Importing numba takes ten times as long as loading the machine code, and compiling takes seconds."""
    assert run_compiling(tmp_path) == ["True", "True", "True"]
    (kept,) = tmp_path.rglob("*.o")
    written = kept.stat().st_mtime_ns
    assert run_compiling(tmp_path) == ["True", "True", "False"]
    assert kept.stat().st_mtime_ns == written


def test_what_was_damaged_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running damaged machine code would end the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "compile_run", lambda: b"machine code")
    monkeypatch.setattr(compiled, "MachineCode", bytes)
    for _ in range(2):
        assert compiled_run.__wrapped__() == b"machine code"
        kept_in().write_bytes(b"damaged")


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr(compiled, "compile_run", lambda: b"machine code")
    monkeypatch.setattr(compiled, "MachineCode", bytes)
    assert compiled_run.__wrapped__() == b"machine code"
    assert not compiled.is_kept()


def test_other_source_is_kept_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = kept_in()
    changed = tmp_path / "malloc.py"
    changed.write_text(Path(str(malloc.__file__)).read_text() + "\n# changed\n")
    monkeypatch.setattr(malloc, "__file__", str(changed))
    assert kept_in() != before


def test_another_processor_or_numba_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {kept_in()}
    monkeypatch.setattr(compiled, "processor", lambda: "another")
    found.add(kept_in())
    monkeypatch.setattr(compiled, "version", lambda package: f"{package} another")
    found.add(kept_in())
    assert len(found) == 3
