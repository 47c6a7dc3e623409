"""Trials, searches and the progress of a sweep as text: while it runs, for ``sweep --list`` and for ``status``."""

from collections.abc import Iterator, Sequence

from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.units import format_seconds
from fsdp_bench.sweep.frontier.cell import SearchedCell
from fsdp_bench.sweep.progress import PROGRESS, Status


def needing_gpu_line(needs: Sequence[str]) -> str:
    """Return the line about entries that are not listed because they depend on a GPU that is missing here."""
    return f"not listed, because their sizes depend on the GPU, which is not here: {'; '.join(needs)}"


def ending(record: TrialRecord) -> str:
    """Return the outcome of a trial with its time and reason: ``ok 1.2 s``."""
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.outcome.value} {record.wall_seconds:.1f} s{reason}"


def search_status(cell: SearchedCell, lacks_gpu: bool) -> str:
    """Return the status of a search before it runs: skipped, found, or the range and the start."""
    if cell.status == "skipped":
        return f"skipped: {cell.reason}"
    if cell.status == "found":
        text = f"found: {cell.print(cell.fits)}"
    else:
        values = cell.quantity_range
        ends = f"{values.print(values.smallest)} to {values.print(values.largest)}"
        start = "where it begins depends on the GPU" if lacks_gpu else cell.start
        text = f"searches {values.num_steps} steps, {ends}, {start}"
    return f"{text}; {cell.reason}" if cell.reason and cell.records else text


def search_result(cell: SearchedCell) -> str:
    """Return the result of a search, and the prediction."""
    if cell.status != "found":
        return f"{cell.status}: {cell.reason}"
    predicted = cell.predicted.fits
    text = "unknown" if predicted is None else cell.print(predicted)
    count = len(cell.records)
    return f"{cell.print(cell.fits)} fits, predicted {text}, {count} trial{'' if count == 1 else 's'}"


def status_lines(status: Status) -> Iterator[str]:
    """Yield the answer, and below it what runs and the job."""
    yield f"{status.folder}: {_answer(status)}"
    if status.running is not None:
        yield f"  running for {_seconds(status.running_seconds)}, on {status.node}: {status.running}"
    elif status.state == "interrupted":
        yield "  nothing runs; the same command goes on where it ended"
    if status.seconds_left is not None:
        yield f"  about {_seconds(status.seconds_left)} left, if trials go on taking what they took at the median"
    if status.job is not None:
        yield f"  {_job(status)}"


def _answer(status: Status) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in status.outcomes.items())
    num_records = sum(status.outcomes.values())
    records = f"{num_records} record{'s' * (num_records > 1)}: {counts}"
    if status.state == "unknown":
        return f"{records}; how many trials the sweep has is {UNKNOWN}: its {PROGRESS} is not here"
    if status.total is None:
        return "nothing has run yet" if status.state == "queued" else "nothing has run, and Slurm knows no job of it"
    recorded = f"; {records}" if counts else ""
    states = {"done": "done", "running": "running", "queued": "waiting in the queue"}
    state = states.get(status.state, "interrupted")
    return f"{state}, {status.done} of {status.total} {status.what} done, {status.left} left{recorded}"


def _job(status: Status) -> str:
    job = status.job
    assert job is not None
    where = f" on {job.nodes}" if job.nodes else ""
    why = f" ({job.reason})" if job.reason not in ("", "None") else ""
    is_timed = job.state == "RUNNING" and job.seconds_left is not None
    left = f", {_seconds(job.seconds_left)} until its time limit" if is_timed else ""
    again = "" if not job.restarts else f", requeued {job.restarts} time{'s' * (job.restarts > 1)}"
    return f"job {job.id}: {job.state}{where}{why}{left}{again}"


def _seconds(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else format_seconds(seconds)
