"""The compiled replay against the same functions uncompiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fsdp_bench.predict import compiled, malloc, step
from fsdp_bench.predict.allocator import Run, replay
from fsdp_bench.predict.compiled import compiled_run, kept_in
from fsdp_bench.predict.events import Event, Kind
from fsdp_bench.predict.kernels import CUDA
from fsdp_bench.sweep.drawn_cells import Cell, draw_cells
from tests.predict.test_allocator import MIB, STEPS, events_from

CELLS = [cell for cell in draw_cells(60, seed=5, device="cuda") if cell.model.head_dim % 4 == 0]


@settings(deadline=None)
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


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(CELLS), st.floats(0.7, 1.1), st.booleans())
def test_programs_read_the_same_with_and_without_room(cell: Cell, share: float, expandable: bool) -> None:
    program = step.first_steps(replace(cell.model, num_hidden_layers=9), cell.setup, CUDA)
    needed = replay(program, None, expandable).peak_reserved_bytes
    card_bytes = int(share * needed)
    assert replay(program, card_bytes, expandable) == replay(program, card_bytes, expandable, run=compiled_run())


def test_more_blocks_than_a_replay_begins_with_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events = events_from([(0, 1000 * (index + 1), 0) for index in range(200)])
    expected = replay(events)
    monkeypatch.setattr("fsdp_bench.predict.allocator.CAPACITY", 16)
    assert replay(events) == replay(events, run=compiled_run()) == expected


@pytest.mark.parametrize("run", [malloc.run, compiled_run()], ids=["plain", "compiled"])
def test_a_tensor_that_is_not_alive_is_not_freed(run: Run) -> None:
    events = [Event(Kind.ALLOCATE, 0, 512), Event(Kind.FREE, 0, 512), Event(Kind.FREE, 0, 512)]
    with pytest.raises(KeyError, match="a tensor that is not alive"):
        replay(events, run=run)


def test_it_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    """The second process finds what the first one left; compiling would take seconds and new files."""
    code = "from fsdp_bench.predict.compiled import compiled_run; compiled_run()"
    kept = []
    for _ in range(2):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        kept.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")})
    assert len(kept[0]) == 1
    assert kept[0] == kept[1]


def test_what_is_kept_needs_no_numba(tmp_path: Path) -> None:
    """Importing numba takes ten times as long as loading the machine code."""
    code = "import sys; from fsdp_bench.predict.compiled import compiled_run as c; c(); print('numba' in sys.modules)"

    def imports_numba() -> bool:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
        return done.stdout.strip() == "True"

    assert [imports_numba(), imports_numba()] == [True, False]
    (kept,) = tmp_path.rglob("*.o")
    kept.write_bytes(b"damaged")
    assert [imports_numba(), imports_numba()] == [True, False]


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same() -> None:
    code = (
        "from fsdp_bench.predict.allocator import replay;"
        "from fsdp_bench.predict.compiled import compiled_run, is_kept;"
        "print(replay((), run=compiled_run()) == replay(()), is_kept())"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": "/proc/none"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"]


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
