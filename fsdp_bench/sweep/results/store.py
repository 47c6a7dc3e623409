"""Results on disk: append-only, readable without the tool.

results/MACHINE/SWEEP/
    machine.json     the machine and its versions
    sweep.toml       the sweep file, as it was run
    trials/ID.json   one record a trial, written whole or not at all
    set-aside/       records that were broken or superseded by --retry, by name; never deleted
    trials.csv       the flat table, rebuilt from the records
    frontier.json    of a sweep with [frontier]: what was found in each cell; rebuilt from the records
    frontier.csv     the same as a flat table
    traces/ID/       with --trace: a profiled step of every rank, for Perfetto
    snapshots/ID/    with --memory-snapshot: every rank's allocations, for pytorch.org/memory_viz
    *.png            the charts drawn from them
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from fsdp_bench.spec.codec import from_json, to_json, write_atomically
from fsdp_bench.spec.errors import ResultsError, SpecError
from fsdp_bench.spec.frontier import FrontierRecord, read_frontier
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.results.flat import csv_row, flat_row, frontier_row

if TYPE_CHECKING:
    import pandas as pd


MOST_ERROR_CHARACTERS = 200
_BESIDE_TRIALS = ("machine.json", "frontier.json")
"""Files of a sweep's folder that are no records: the sweep may be named ``trials``."""


def check_folder_name(name: str, where: str) -> None:
    """Refuse a name that is no folder's own, such as one that leads out of the results.

    Raises:
        SpecError: naming ``where`` it was given.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise SpecError(
            f"{where}: {name!r} is not allowed; up to 100 letters, digits, '.', '_' and '-', for a folder's name"
        )


class Store:
    """One sweep's folder, held by one process at a time while it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials = folder / "trials"
        self.traces = folder / "traces"
        self.snapshots = folder / "snapshots"
        self.scratch = folder.absolute() / ".scratch"
        self._lock: Any = None

    def open(self) -> None:
        """Create the folders, take the lock, sweep away what a killed run left half done.

        Raises:
            ResultsError: when the folder cannot be written, or another process holds it.
        """
        try:
            self._take_lock()
            self.check_lock()
            self.check_writable()
        except ResultsError:
            self._give_lock_back()
            raise
        for leftover in self.trials.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        remove_leftovers(self.folder)
        if self.scratch.is_symlink():
            self.scratch.unlink()  # what it points to is not ours
        self.remove_scratch(self.scratch)

    def close(self) -> None:
        """Remove the scratch folder and give the lock back."""
        if self._lock is not None:
            self.remove_scratch(self.scratch)
            self._give_lock_back()

    def _take_lock(self) -> None:
        try:
            self.trials.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._lock_path, "w")  # noqa: SIM115 - held until close()
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(f"{self.folder}: another fsdp-bench sweep is writing here; wait for it to end") from None
        except OSError as error:
            raise self.error(error) from None

    def _give_lock_back(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _lock_path(self) -> Path:
        return self.folder / ".lock"

    def check_lock(self) -> None:
        """Look whether the lock file is still the one that this process holds.

        Raises:
            ResultsError: when it was removed or replaced, so that another sweep may write here.
        """
        try:
            if self._lock is None or os.path.samestat(os.fstat(self._lock.fileno()), os.stat(self._lock_path)):
                return
        except OSError:
            pass
        raise ResultsError(
            f"{self._lock_path}: was removed or replaced while this sweep ran, so that another one may write here;"
            " run the same command again, which keeps what is recorded"
        )

    def check_writable(self) -> None:
        """Write and remove as much as a large record.

        Raises:
            ResultsError: when that fails: read-only or full.
        """
        probe = self.trials / ".probe.tmp"
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * 65536)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self.error(error) from None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)

    def error(self, error: OSError) -> ResultsError:
        """Return the error that says why results cannot be written, and what would help."""
        helps = {errno.ENOSPC: "free space", errno.EDQUOT: "free space", errno.EFBIG: "raise the file size limit"}
        help_text = helps.get(error.errno or 0, "choose a folder that can be written with --results")
        return ResultsError(
            f"{self.folder}: results cannot be written: {error.strerror or error}; {help_text} and run the same"
            " command again, which keeps what is recorded"
        )

    def make_scratch(self, trial_id: str) -> Path:
        """Return an empty folder for a trial's workers.

        Raises:
            ResultsError: when it cannot be made.
        """
        folder = self.scratch / trial_id
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise self.error(error) from None
        return folder

    def remove_scratch(self, folder: Path) -> None:
        """Remove a scratch folder, as far as that is possible."""
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the sweep's folder atomically.

        Raises:
            ResultsError: when the folder cannot be written.
        """
        try:
            write_atomically(self.folder / name, data)
        except OSError as error:
            raise self.error(error) from None

    def keep_files(self, trial_id: str, scratch: Path) -> None:
        """Move the traces and snapshots that a trial's ranks left in its scratch folder to folders named for the trial.

        Raises:
            ResultsError: when they cannot be kept.
        """
        try:
            for pattern, kept in (("*.trace.json.gz", self.traces), ("*.snapshot.pickle", self.snapshots)):
                for found in sorted(scratch.glob(pattern)):
                    (kept / trial_id).mkdir(parents=True, exist_ok=True)
                    found.replace(kept / trial_id / found.name)
        except OSError as error:
            raise self.error(error) from None

    def write_record(self, record: TrialRecord) -> None:
        """Store a trial's record; there must be none.

        Raises:
            ResultsError: when the folder cannot be written, or another sweep writes here too.
        """
        self.check_lock()
        if self._path(record.id).exists():
            raise ResultsError(f"{self._path(record.id)}: another sweep has recorded this trial meanwhile; it is kept")
        self.write(f"trials/{record.id}.json", to_json(record))

    def _path(self, trial_id: str) -> Path:
        return self.trials / f"{trial_id}.json"

    def read(self, trial_id: str) -> tuple[TrialRecord | None, str | None]:
        """Return a trial's record; where it is broken, set it aside and return None and one line that says so.

        Raises:
            SpecError: when a newer fsdp-bench wrote it.
            ResultsError: when it cannot be read or moved.
        """
        path = self._path(trial_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            record = read_record(data, path.name)
            if record.id != trial_id:
                raise msgspec.ValidationError(f"holds trial {record.id}")
        except SpecError as error:
            raise SpecError(f"{path.parent}: {error}") from None
        except msgspec.DecodeError as error:
            aside = self.set_aside(trial_id)
            return None, f"{path.name} is not a whole record ({_short(error)}); kept as {aside}, its trial runs again"
        return record, None

    def read_all(self) -> tuple[list[TrialRecord], list[str]]:
        """Return every record; broken ones are set aside, with a line for each.

        Raises:
            SpecError, ResultsError: as ``read``.
        """
        answers = [self.read(path.stem) for path in sorted(self.trials.glob("*.json"))]
        return [record for record, _ in answers if record is not None], [note for _, note in answers if note]

    def peek_all(self) -> list[TrialRecord]:
        """Return every whole record; moves nothing.

        Raises:
            SpecError: when a newer fsdp-bench wrote one.
        """
        found = []
        for path in sorted(self.trials.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(read_record(path.read_bytes(), path.name))
        return found

    def set_aside(self, trial_id: str) -> Path:
        """Move a record to set-aside/ under a new name; return that.

        Raises:
            ResultsError: when it cannot be moved.
        """
        folder = self.folder / "set-aside"
        try:
            folder.mkdir(exist_ok=True)
            number = 1
            while (target := folder / f"{trial_id}.{number}.json").exists():
                number += 1
            os.rename(self._path(trial_id), target)
        except OSError as error:
            raise self.error(error) from None
        return target.relative_to(self.folder)

    def write_machine(self, machine: Machine) -> None:
        """Store the machine's description."""
        self.write("machine.json", to_json(machine))

    def write_table(self, records: list[TrialRecord]) -> None:
        """Rebuild trials.csv."""
        self._write_rows("trials.csv", [flat_row(record) for record in records])

    def write_frontier(self, record: FrontierRecord) -> None:
        """Rebuild frontier.json and frontier.csv."""
        self.write("frontier.json", to_json(record))
        self._write_rows("frontier.csv", [frontier_row(cell, record) for cell in record.cells])

    def _write_rows(self, name: str, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["id"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(csv_row, rows))
        self.write(name, text.getvalue().encode())


def remove_leftovers(folder: Path) -> None:
    """Remove what write_atomically began in a folder in a process that has ended since."""
    for path in folder.glob(".*.tmp"):
        _, _, number = path.stem.rpartition(".")
        if number.isdigit() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(OSError):
                path.unlink()


def read_records(folder: Path, notes: list[str] | None = None) -> list[TrialRecord]:
    """Read every record below a folder, in the order of their trials: a sweep's, a machine's or all results.

    Args:
        folder: a sweep's folder, or one above it.
        notes: gets one line for each record that is broken and left out.

    Raises:
        ResultsError: when there is none, or all are broken; without ``notes``, when one is broken.
        SpecError: when a newer fsdp-bench wrote one.
    """
    records, broken = [], []
    for path in _record_paths(folder):
        try:
            records.append(read_record(path.read_bytes(), path.name))
        except msgspec.DecodeError as error:
            broken.append(f"{path}: not a whole record ({_short(error)}); running its sweep again sets it aside")
        except OSError as error:
            broken.append(f"{path}: cannot be read: {error.strerror}")
    if broken and (notes is None or not records):
        raise ResultsError(broken[0] + (f"; so are {len(broken) - 1} more" if broken[1:] else ""))
    if notes is not None:
        notes += broken
    return sorted(records, key=lambda record: (record.sweep, record.started_at))


def _short(error: Exception) -> str:
    """Return an error in one line of bounded length: it may repeat what a damaged file holds."""
    text = " ".join(str(error).split())
    return text if len(text) <= MOST_ERROR_CHARACTERS else text[:MOST_ERROR_CHARACTERS] + " [...]"


def sweep_folders(folder: Path) -> list[Path]:
    """Return the folders MACHINE/SWEEP of which a folder holds records: itself, or what is below it.

    Raises:
        ResultsError: when there is none.
    """
    return list(dict.fromkeys(path.parent.parent for path in _record_paths(folder)))


def _record_paths(folder: Path) -> list[Path]:
    if folder.absolute().name == "trials" and not (folder / "trials").is_dir():
        folder = folder.absolute().parent
    paths = sorted(path for path in folder.glob("**/trials/*.json") if path.name not in _BESIDE_TRIALS)
    if not paths:
        raise ResultsError(f"{folder}: no results here; `fsdp-bench sweep FILE` writes them to results/MACHINE/SWEEP/")
    return paths


def read_frontier_of(folder: Path) -> FrontierRecord | None:
    """Read the frontier.json of a sweep's folder; None where the sweep searched nothing.

    Raises:
        ResultsError: when it is broken.
        SpecError: when a newer fsdp-bench wrote it.
    """
    path = folder / "frontier.json"
    try:
        return read_frontier(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        message = f"{path}: not a whole record ({_short(error)}); running its sweep again rebuilds it"
        raise ResultsError(message) from None
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None


def load_results(folder: str | Path) -> pd.DataFrame:
    """Return results as a table, one row a trial, the columns of trials.csv: bytes and seconds, units in the names.

    A record that is broken is left out, with a warning that names it.

    Raises:
        ResultsError: when there are no results, or all records are broken.
    """
    import pandas as pd

    notes: list[str] = []
    records = read_records(Path(folder), notes)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return pd.DataFrame([flat_row(record) for record in records])


def machine_description(folder: Path) -> str:
    """Return the one line that describes the machine of a sweep's folder; ``unknown machine`` without machine.json."""
    try:
        return from_json((folder / "machine.json").read_bytes(), Machine).describe()
    except (OSError, msgspec.DecodeError):
        return "unknown machine"
