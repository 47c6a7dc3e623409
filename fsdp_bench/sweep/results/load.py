"""Reads results: the records in a folder, frontier.json, and load_results(), the table for Python users."""

from __future__ import annotations

import warnings
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fsdp_bench.spec.codec import from_file
from fsdp_bench.spec.errors import ResultsError
from fsdp_bench.spec.frontier import FrontierRecord, read_frontier
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.sweep.machine import Machine
from fsdp_bench.sweep.progress import JOB, PROGRESS
from fsdp_bench.sweep.results.flat import flat_row
from fsdp_bench.sweep.results.store import in_one_line

if TYPE_CHECKING:
    import pandas as pd


_BESIDE_TRIALS = ("machine.json", "frontier.json", PROGRESS, JOB)
"""Files that are not records. In the folder of a sweep that is named ``trials`` they match the pattern of records."""


def read_records(folder: Path, notes: list[str] | None = None) -> list[TrialRecord]:
    """Read every record below a folder, in the order of trials; ``notes`` get a line for each broken one, left out.

    Raises ResultsError for none, or all broken, or one without ``notes``; SpecError if a newer fsdp-bench wrote one.
    """
    records, broken = [], []
    for path in _record_paths(folder):
        try:
            records.append(read_record(path.read_bytes(), str(path)))
        except msgspec.DecodeError as error:
            broken.append(f"{path}: not a whole record ({in_one_line(error)}); running its sweep again sets it aside")
        except OSError as error:
            broken.append(f"{path}: cannot be read: {error.strerror}")
    if broken and (notes is None or not records):
        raise ResultsError(broken[0] + (f"; so are {len(broken) - 1} more" if broken[1:] else ""))
    if notes is not None:
        notes += broken
    return sorted(records, key=lambda record: (record.sweep, record.started_at))


def sweep_folders(folder: Path) -> list[Path]:
    """Return folders MACHINE/SWEEP with records: ``folder`` or below it. Raises ResultsError without any."""
    return list(dict.fromkeys(path.parent.parent for path in _record_paths(folder)))


def _record_paths(folder: Path) -> list[Path]:
    if folder.absolute().name == "trials" and not (folder / "trials").is_dir():
        folder = folder.absolute().parent
    # not Path.glob, which stumbles over the scratch folders of running trials as they go
    names = glob("**/trials/*.json", root_dir=folder, recursive=True)
    paths = sorted(folder / name for name in names if Path(name).name not in _BESIDE_TRIALS)
    if not paths:
        raise ResultsError(f"{folder}: no results here; `fsdp-bench sweep FILE` writes them to results/MACHINE/SWEEP/")
    return paths


def read_frontier_of(folder: Path) -> FrontierRecord | None:
    """Read a sweep's frontier.json, or None. Raises ResultsError if broken, SpecError if newer."""
    path = folder / "frontier.json"
    try:
        return read_frontier(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        message = f"{path}: not a whole record ({in_one_line(error)}); running its sweep again rebuilds it"
        raise ResultsError(message) from None
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from None


def load_results(folder: str | Path) -> pd.DataFrame:
    """Return results as a table: one row for each trial, the columns of trials.csv. Column names contain the unit.

    A broken record is skipped, with a warning that names it.

    Raises:
        ResultsError: if there are no results, or all records are broken.
    """
    import pandas as pd

    notes: list[str] = []
    records = read_records(Path(folder), notes)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return pd.DataFrame([flat_row(record) for record in records])


def machine_description(folder: Path) -> str:
    """Return one line that describes the machine of a sweep's folder. ``unknown machine`` without machine.json."""
    machine = from_file(folder / "machine.json", Machine)
    return "unknown machine" if machine is None else machine.describe()
