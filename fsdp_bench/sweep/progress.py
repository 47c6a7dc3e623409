"""The progress of a sweep: progress.json, which the running sweep writes and ``fsdp-bench status`` reads."""

import contextlib
import os
import statistics
import time
from collections import Counter
from glob import glob
from pathlib import Path
from typing import Literal

import msgspec

from fsdp_bench.spec.codec import from_file
from fsdp_bench.spec.errors import MachineError, ResultsError
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.sweep.launchers.slurm import JobState, job_state
from fsdp_bench.sweep.results.lock import last_writer, seems_to_live
from fsdp_bench.sweep.results.store import Store

PROGRESS = "progress.json"
JOB = "job.json"
"""The job that ``fsdp-bench submit`` submitted."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The report of the sweep that runs, or ran last, in a folder."""

    what: Literal["trials", "cells"]
    """The unit that is counted: a sweep with [frontier] counts cells."""
    total: int
    done: int
    """Recorded trials, or cells whose search has ended, when the running trial began."""
    to_run: int | None = None
    """Trials of them that are to be run, the running one included, and not skipped. None for cells."""
    running: str | None = None
    """The label of the running trial; None if the sweep has ended."""
    running_id: str | None = None
    running_since: float | None = None
    """Seconds since the epoch."""
    job: str | None = None
    """The Slurm job that the sweep runs in."""
    has_ended: bool = False
    """Whether all that was asked for is done; of a cell, also that its search has found no answer."""


State = Literal["running", "done", "interrupted", "queued", "not started", "unknown"]
"""``unknown``: there are records, and no PROGRESS, which is not copied or committed with them."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a sweep."""

    folder: str
    state: State
    what: Literal["trials", "cells"] | None = None
    total: int | None = None
    done: int | None = None
    outcomes: dict[str, int] = {}
    """The number of the folder's records with each outcome."""
    running: str | None = None
    running_seconds: float | None = None
    seconds_left: float | None = None
    """The time that is left, if trials take what recorded ones took at the median. None if that is not known."""
    node: str | None = None
    """The node on which the sweep runs, or ran last."""
    job: JobState | None = None
    """The Slurm job, if Slurm knows it."""

    @property
    def left(self) -> int | None:
        """Trials or cells that are not done, the running one included."""
        return None if self.total is None or self.done is None else self.total - self.done


def submitted_job(folder: Path) -> str | None:
    """Return the ID of the job that was submitted last for a sweep's folder."""
    found = from_file(folder / JOB, dict[str, str])
    return found.get("id") if found is not None else None


def status_of(folder: Path) -> list[Status]:
    """Return the status of a sweep's folder, or of all below.

    Raises ResultsError without a sweep, SpecError for a newer record.
    """
    # not Path.glob, which stumbles over the scratch folders of running trials as they go
    names = (name for which in (PROGRESS, JOB) for name in glob(f"**/{which}", root_dir=folder, recursive=True))
    records = (os.path.dirname(name) for name in glob("**/trials/*.json", root_dir=folder, recursive=True))
    found = sorted({(folder / name).parent for name in (*names, *records)})
    if not found:
        raise ResultsError(f"{folder}: no sweep has run or was submitted here; fsdp-bench sweep FILE runs one")
    return [_status(one) for one in found]


def _status(folder: Path) -> Status:
    progress = from_file(folder / PROGRESS, Progress)
    state: State
    job_id = submitted_job(folder) or (progress.job if progress is not None else None)
    job = None
    if job_id is not None:
        with contextlib.suppress(MachineError):  # Slurm is not here, or does not answer
            job = job_state(job_id)
    records = Store(folder).peek_all()
    outcomes = dict(Counter(record.outcome.value for record in records))
    if progress is None:
        state = "queued" if job is not None else "unknown" if records else "not started"
        return Status(folder=str(folder), state=state, outcomes=outcomes, job=job)
    writer = last_writer(folder)
    is_running = progress.running is not None and writer is not None and seems_to_live(folder, writer)
    is_recorded = any(record.id == progress.running_id for record in records)  # when its manager was killed
    done = progress.done + is_recorded
    state = "running" if is_running else "done" if progress.has_ended else "interrupted"
    if state == "interrupted" and job is not None:
        state = "queued"
    took = [record.wall_seconds for record in records if record.outcome is not Outcome.SKIPPED]
    each = statistics.median(took) if took and progress.to_run is not None else None
    since = progress.running_since if is_running else None
    return Status(
        folder=str(folder),
        state=state,
        what=progress.what,
        total=progress.total,
        done=done,
        outcomes=outcomes,
        running=progress.running if is_running else None,
        running_seconds=None if since is None else max(time.time() - since, 0.0),
        seconds_left=None if each is None or state == "done" else each * ((progress.to_run or 0) - is_recorded),
        node=writer.node if writer is not None else None,
        job=job,
    )
