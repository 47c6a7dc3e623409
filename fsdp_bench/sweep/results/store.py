"""Results on disk: append-only, readable without the tool.

A trial counts as done when trials/ID.json exists; config/trial.py computes the ID.

results/MACHINE/SWEEP/
    machine.json     the machine and the versions of its software
    sweep.toml       the sweep file, as it was run
    progress.json    how far the sweep is, or was; job.json: the job of Slurm that was submitted for it
    trials/ID.json   one record for each trial, written whole or not at all
    set-aside/       records that are broken or whose trial ran again; never deleted
    trials.csv       the flat table, rebuilt from the records
    frontier.json    for a sweep with [frontier]: the answer of each cell, rebuilt from the records
    frontier.csv     frontier.json as a flat table
    traces/ID/       with --trace: a profiled step of every rank, for Perfetto
    snapshots/ID/    with --memory-snapshot: every rank's allocations, for pytorch.org/memory_viz
    *.png            charts
"""

import contextlib
import csv
import errno
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.files import write_atomically
from fsdp_bench.spec.frontier import FrontierRecord
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.results.flat import csv_row, flat_row, frontier_row
from fsdp_bench.sweep.results.lock import FolderLock

MOST_ERROR_CHARACTERS = 200


class Store:
    """The folder of one sweep. Locks allow one process at a time to write, on any node.

    All methods raise ResultsError, with what would help, where a file cannot be read, written or moved: the folder is
    read-only, the disk is full or has no inodes left. Those that read raise SpecError for a newer fsdp-bench's records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials = folder / "trials"
        self.traces = folder / "traces"
        self.snapshots = folder / "snapshots"
        self.scratch = folder.absolute() / ".scratch"
        self.lock = FolderLock(folder)

    def open(self) -> None:
        """Create the folders, take the lock, remove unfinished files of a killed run.

        Raises ResultsError if the folder cannot be written, or another process has the lock.
        """
        try:
            with self.writing():
                self.trials.mkdir(parents=True, exist_ok=True)
                self.lock.take()
                self.check_lock()
                self.check_writable()
        except ResultsError:
            self.lock.give_back()
            raise
        for leftover in self.trials.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        remove_leftovers(self.folder)
        if self.scratch.is_symlink():
            self.scratch.unlink()  # what it points to is not ours
        self.remove_scratch(self.scratch)

    def close(self) -> None:
        """Remove the scratch folder and release the lock."""
        if self.lock.is_taken:
            if self.lock.lost() is None:
                self.remove_scratch(self.scratch)  # else it is another sweep's by now
            self.lock.give_back()

    def check_lock(self) -> None:
        """Check that the locks are still this process's. Raises ResultsError if another sweep may write."""
        if (path := self.lock.lost()) is not None:
            raise ResultsError(
                f"{path}: was removed or replaced while this sweep ran: another sweep could be writing here;"
                " run the same command again, which keeps what is recorded"
            )

    def check_writable(self, num_files: int = 1) -> None:
        """Check that files can be written, the first as large as a large record, and remove them."""
        probes = [self.trials / f".probe-{number}.tmp" for number in range(num_files)]
        try:
            for number, probe in enumerate(probes):
                with self.writing(), open(probe, "wb") as file:
                    file.write(b"\0" * 65536 * (number == 0))
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for probe in probes:
                with contextlib.suppress(OSError):
                    probe.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an OSError into the ResultsError that says why results cannot be written, and what would help."""
        try:
            yield
        except OSError as error:
            helps = {errno.ENOSPC: "free space", errno.EDQUOT: "free space", errno.EFBIG: "raise the file size limit"}
            help_text = helps.get(error.errno or 0, "choose a folder that can be written with --results")
            raise ResultsError(
                f"{self.folder}: results cannot be written: {error.strerror or error}; {help_text} and run the same"
                " command again, which keeps what is recorded"
            ) from None

    def make_scratch(self, trial_id: str) -> Path:
        """Return an empty scratch folder for a trial's ranks."""
        folder = self.scratch / trial_id
        shutil.rmtree(folder, ignore_errors=True)
        with self.writing():
            folder.mkdir(parents=True)
        return folder

    def remove_scratch(self, folder: Path) -> None:
        """Remove a scratch folder. Errors are ignored."""
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the sweep's folder atomically."""
        with self.writing():
            write_atomically(self.folder / name, data)

    def keep_files(self, trial_id: str, scratch: Path) -> None:
        """Move a trial's traces and snapshots from its scratch folder to traces/ID and snapshots/ID."""
        with self.writing():
            for pattern, kept in (("*.trace.json.gz", self.traces), ("*.snapshot.pickle", self.snapshots)):
                for found in sorted(scratch.glob(pattern)):
                    (kept / trial_id).mkdir(parents=True, exist_ok=True)
                    found.replace(kept / trial_id / found.name)

    def write_record(self, record: TrialRecord) -> None:
        """Write a trial's first record. Raises ResultsError if it has one or the folder cannot be written."""
        self.check_lock()
        if self._path(record.id).exists():
            raise ResultsError(f"{self._path(record.id)}: another sweep has recorded this trial meanwhile; it is kept")
        self.write(f"trials/{record.id}.json", to_json(record))

    def _path(self, trial_id: str) -> Path:
        return self.trials / f"{trial_id}.json"

    def read(self, trial_id: str) -> tuple[TrialRecord | None, str | None]:
        """Return a trial's record and None; (None, None) if it has none.

        A broken record is moved to set-aside/; then return None and one line about it.
        """
        path = self._path(trial_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            record = read_record(data, str(path))
            if record.id != trial_id:
                raise msgspec.ValidationError(f"holds trial {record.id}")
        except msgspec.DecodeError as error:
            aside = self.set_aside(trial_id)
            why = f"is not a whole record ({in_one_line(error)})"
            return None, f"{path.name} {why}; kept as {aside}, its trial runs again"
        return record, None

    def look_up(self, trial: Trial, retry: frozenset[Outcome], notes: list[str]) -> TrialRecord | None:
        """Return the record of a trial that is done; None if the trial is to be run.

        A trial with a record is done. But it runs again if its outcome is in ``retry``, if it timed out under a shorter
        time limit, or if it was skipped and the reason no longer holds; its record is then moved to set-aside/.

        A line is added to ``notes`` if a record is moved to set-aside/.
        """
        record, note = self.read(trial.spec.id)
        if note:
            notes.append(note)
        if record is None or not _runs_again(record, trial, retry):
            return record
        aside = self.set_aside(trial.spec.id)
        notes.append(f"{trial.spec.id} ({record.outcome.value}) runs again; its record is kept as {aside}")
        return None

    def read_all(self) -> tuple[list[TrialRecord], list[str]]:
        """Return every record, and a line for each broken record, which is moved to set-aside/."""
        answers = [self.read(path.stem) for path in sorted(self.trials.glob("*.json"))]
        return [record for record, _ in answers if record is not None], [note for _, note in answers if note]

    def peek_all(self) -> list[TrialRecord]:
        """Return every record that is not broken. Moves nothing."""
        found = []
        for path in sorted(self.trials.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(read_record(path.read_bytes(), str(path)))
        return found

    def set_aside(self, trial_id: str) -> Path:
        """Move a record to set-aside/ under a new name; return its new path."""
        folder = self.folder / "set-aside"
        with self.writing():
            folder.mkdir(exist_ok=True)
            number = 1
            while (target := folder / f"{trial_id}.{number}.json").exists():
                number += 1
            os.rename(self._path(trial_id), target)
        return target.relative_to(self.folder)

    def write_table(self, records: list[TrialRecord]) -> None:
        """Write trials.csv."""
        self._write_rows("trials.csv", [flat_row(record) for record in records])

    def write_frontier(self, record: FrontierRecord) -> None:
        """Write frontier.json and frontier.csv."""
        self.write("frontier.json", to_json(record))
        self._write_rows("frontier.csv", [frontier_row(cell, record) for cell in record.cells])

    def _write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["id"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(csv_row, rows))
        self.write(name, text.getvalue().encode())


def _runs_again(record: TrialRecord, trial: Trial, retry: frozenset[Outcome]) -> bool:
    if record.outcome is Outcome.SKIPPED:
        return trial.skip_reason is None  # it was impossible or excluded, and no longer is
    if record.outcome is Outcome.TIMEOUT and trial.spec.run.timeout_seconds > record.run.timeout_seconds:
        return True
    return record.outcome in retry


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of write_atomically whose process has ended."""
    for path in folder.glob(".*.tmp"):
        _, _, number = path.stem.rpartition(".")
        if number.isdigit() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(OSError):
                path.unlink()


def in_one_line(error: Exception) -> str:
    """Return an error as one line of limited length, because it may quote a damaged file."""
    text = " ".join(str(error).split())
    return text if len(text) <= MOST_ERROR_CHARACTERS else text[:MOST_ERROR_CHARACTERS] + " [...]"
