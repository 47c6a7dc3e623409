"""The progress of a sweep, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_bench.report.text.common import UNKNOWN
from fsdp_bench.spec.units import format_seconds
from fsdp_bench.sweep.progress import PROGRESS, Status


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
