"""Damages results on disk at random and reads them in every way there is.

Whatever is damaged, and however: reading ends with what is whole or with one of the package's own errors, the other
records are read as they were, and no byte is lost.
"""

import io
import random
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from fsdp_bench.report.charts.frontier import draw_frontier
from fsdp_bench.report.charts.trial_bars import draw_all
from fsdp_bench.report.html.write import html, page_of
from fsdp_bench.report.measured.frontier_text import print_frontier
from fsdp_bench.report.measured.tables import print_communication, print_table
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import FsdpBenchError
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.sweep.results.flat import communication_rows, flat_row
from fsdp_bench.sweep.results.load import machine_description, read_frontier_of, read_records
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.validate.memory import compare_with_record
from tests.attacks import count_and_seed
from tests.attacks.hostile import damaged

RESULTS = Path(__file__).parents[2] / "results" / "xeon-2-cores"
NUM_RECORDS = 3
"""Records of each sweep, so that a damaged one has neighbours."""
NUM_CELLS = 4
"""Cells of a frontier."""
CHARTS_EVERY = 200
"""Charts are drawn for one in so many attacks: they take a second."""


class Attacked:
    """A sweep's results in a folder of their own, of which one file at a time is damaged."""

    def __init__(self, source: Path, home: Path) -> None:
        self.folder = home / "here" / source.name
        (self.folder / "trials").mkdir(parents=True)
        self.files: dict[Path, bytes] = {}
        for path in sorted((source / "trials").glob("*.json"))[:NUM_RECORDS]:
            self._add(self.folder / "trials" / path.name, path.read_bytes())
        for name in ("machine.json", "frontier.json"):
            if (source / name).exists():
                self._add(self.folder / name, (source / name).read_bytes())
        if (found := read_frontier_of(self.folder)) is not None:
            fewer = msgspec.structs.replace(found, cells=found.cells[:NUM_CELLS])
            self._add(self.folder / "frontier.json", to_json(fewer))
        self.records = {
            path: read_record(data, path.name) for path, data in self.files.items() if path.parent.name == "trials"
        }

    def _add(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self.files[path] = data

    def attack(self, draw: random.Random, with_charts: bool) -> str:
        """Damage one file, read everything, put the file back; return what became of it.

        Raises:
            Exception: where something else than an error of the package's own came of it.
        """
        path = draw.choice(list(self.files))
        data = damaged(self.files[path], draw)
        path.write_bytes(data)
        try:
            return self._read(path, data, with_charts)
        finally:
            shutil.rmtree(self.folder / "set-aside", ignore_errors=True)
            for outdated in self.folder.glob("*.png"):
                outdated.unlink()
            path.write_bytes(self.files[path])

    def _read(self, damaged: Path, data: bytes, with_charts: bool) -> str:
        reports, frontier = self._report(damaged), said(lambda: read_frontier_of(self.folder))
        if frontier is not REFUSED and frontier is not None:
            if damaged.name == "frontier.json":
                print_frontier(frontier, quiet())
            if with_charts:
                draw_frontier(frontier, self.folder)
        assert damaged.read_bytes() == data, "a reader changed a file"
        page = said(lambda: page_of(self.folder))
        assert page is REFUSED or html(page, date(2026, 1, 1)).count("<script>") == 1
        if with_charts and reports is not REFUSED:
            draw_all(read_records(self.folder, []), self.folder, machine_description(self.folder))
        swept = self._sweep(damaged, data)
        return "refused" if REFUSED in (reports, frontier, swept) else str(swept)

    def _report(self, damaged: Path) -> object:
        """Read as report, load_results and trials.csv do; a newer version's records are refused."""
        notes: list[str] = []
        records = said(lambda: read_records(self.folder, notes))
        if records is REFUSED:
            return REFUSED
        assert all(str(damaged) in note for note in notes)
        changed = self._check(damaged, records, notes)
        if changed:  # what is printed of the others does not change
            print_table(changed, quiet())
            print_communication(changed, quiet())
            to_json({"trials": [flat_row(record) for record in changed], "communication": communication_rows(changed)})
        for record in changed:
            assert same(read_record(to_json(record), record.id), record), "a record does not survive writing"
            said(lambda record=record: compare_with_record(record))
        machine_description(self.folder)
        return "read"

    def _check(self, damaged: Path, records: list[TrialRecord], notes: list[str]) -> list[TrialRecord]:
        """Every record is read or noted, and the damaged one's neighbours are whole; return those that changed."""
        for note in notes:
            check_line(note)
        assert len(records) + len(notes) == len(self.records)
        assert all(path == damaged or whole in records for path, whole in self.records.items()), "a neighbour was lost"
        return [record for record in records if record not in self.records.values()]

    def _sweep(self, damaged: Path, data: bytes) -> object:
        """Read as a sweep does that goes on."""
        store = Store(self.folder)
        read = said(store.read_all)
        if read is not REFUSED:
            records, notes = read
            if self._check(damaged, records, notes):
                store.write_table(records)
            if notes:
                (aside,) = (self.folder / "set-aside").iterdir()
                assert aside.read_bytes() == data, "what was set aside is not what was there"
                assert not damaged.exists()
                return "set aside"
        assert damaged.read_bytes() == data
        return REFUSED if read is REFUSED else "read"


REFUSED = object()


def said(read: Callable[[], Any]) -> Any:
    """Return what a reader returns, or REFUSED where it ends with one of the package's errors, in one line."""
    try:
        return read()
    except FsdpBenchError as error:
        check_line(str(error))
        return REFUSED


def same(one: TrialRecord, other: TrialRecord) -> bool:
    """Whether two records are equal; NaN equals itself here."""
    return msgspec.json.encode(msgspec.to_builtins(one, enc_hook=str)) == msgspec.json.encode(
        msgspec.to_builtins(other, enc_hook=str)
    )


def check_line(text: str) -> None:
    assert len(text.splitlines()) == 1, text
    assert len(text) < 1500, f"{len(text)} characters"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


COUNT, SEED = count_and_seed(120, 5000)


@pytest.mark.timeout(COUNT * 2 + 300)
def test_results_that_are_damaged_anyhow_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    draw, counts = random.Random(SEED), Counter[str]()
    targets = [Attacked(RESULTS / name, tmp_path) for name in ("cpu", "max-size-quick")]
    for number in range(COUNT):
        counts[draw.choice(targets).attack(draw, number % CHARTS_EVERY == CHARTS_EVERY - 1)] += 1
    assert counts["set aside"] > COUNT / 5  # the damage is real
    assert counts["read"] > COUNT / 10


def test_no_part_of_a_record_is_taken_for_a_whole_one() -> None:
    path = min((RESULTS / "cpu" / "trials").glob("*.json"))
    data = path.read_bytes()
    for length in range(len(data) - 1):  # the last byte is the newline
        with pytest.raises(msgspec.DecodeError):
            read_record(data[:length], path.name)
