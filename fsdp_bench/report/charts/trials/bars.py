"""One trial in a chart: the pieces of its bar, or the label in place of a missing bar.

Only a trial that ended ``ok`` has a bar that counts as a result. This module draws nothing and handles one trial at a
time.
"""

from __future__ import annotations

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.report.charts.colors import Style
from fsdp_bench.report.charts.description import Bar, Piece
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import Offload
from fsdp_bench.spec.units import GIB

STORED = "stored parameters"
OPTIMIZER = "optimizer state"
REST = "activations, gradients, gathered parameters, temporary"
WHOLE = "everything on the device"
OUT_OF_MEMORY = "OOM: up to the limit, which was not enough"
MEDIAN = "median step; the line spans the slowest to the fastest"
EXPOSED = "exposed: no compute meanwhile; its share stands beside the number"
OVERLAPPED = "overlapped with compute"

RETRIES, SUSPECT, SKIPPED = "retries", "suspect", "skipped"

_OUTCOME_LABELS = {
    Outcome.OOM_GPU: "OOM",
    Outcome.OOM_HOST: "OOM (host)",
    Outcome.TIMEOUT: "timeout",
    Outcome.CRASHED: "crashed",
    Outcome.INTERRUPTED: "interrupted",
    Outcome.SKIPPED: SKIPPED,
}


# Lightness and hatches distinguish the parts in black and white.
STYLES = {
    STORED: Style("blue"),
    OPTIMIZER: Style("orange", "///"),
    REST: Style("pale"),
    WHOLE: Style("pale", "..."),
    OUT_OF_MEMORY: Style("paper", "xx"),
    MEDIAN: Style("blue"),
    EXPOSED: Style("red"),
    OVERLAPPED: Style("peach", "..."),
}


def _result(words: tuple[str, ...], *parts: tuple[str, float], spread: tuple[float, float] | None = None) -> Bar:
    """Return the bar of a trial that ended ok, without its number and the labels of its setting."""
    color = "failure" if {RETRIES, SUSPECT} & set(words) else "ink"
    return Bar((), words, tuple(Piece(name, size, STYLES[name]) for name, size in parts), color=color, spread=spread)


def _missing(word: str, limit: int | None = None) -> Bar:
    """Return the bar of a trial that is no result; one that ran out of memory within a known limit reaches up to it."""
    pieces = (Piece(OUT_OF_MEMORY, limit, STYLES[OUT_OF_MEMORY]),) if limit else ()
    return Bar((), (word,), pieces, is_result=False, color="faint" if word == SKIPPED else "failure")


def memory_bar(record: TrialRecord) -> Bar:
    """Return the bar of a trial's peak allocated bytes on its worst rank; the pieces add up to the peak exactly.

    Stored parameters and optimizer state are live at the peak too, unless they are offloaded to host memory. All other
    bytes are one piece. A trial that ran out of memory within a known limit has a piece up to that limit.
    """
    if record.outcome is not Outcome.OK:
        return _missing(ended(record), exceeded_limit(record))
    memory = record.worst_rank_memory
    if memory is None or memory.peak_allocated_bytes is None:
        return _missing("unknown")
    peak, resident = memory.peak_allocated_bytes, memory.parameters_bytes + memory.optimizer_state_bytes
    elsewhere = record.setup.offload is Offload.PARAMS and record.hardware != "cpu"
    parts: tuple[tuple[str, float], ...] = ((WHOLE, peak),)
    if not elsewhere and resident <= peak:
        parts = ((STORED, memory.parameters_bytes), (OPTIMIZER, memory.optimizer_state_bytes), (REST, peak - resident))
    return _result((memory.peak_phase, *_marks(record)), *parts)


def throughput_bar(record: TrialRecord) -> Bar:
    """Return the bar of a trial's tokens per second per rank: the median, and the slowest and fastest measured step."""
    if record.outcome is not Outcome.OK:
        return _missing(ended(record))
    tokens = record.tokens_per_second_per_gpu
    if not tokens:
        return _missing("unknown")
    # The slowest rank determines when a step ends.
    steps = [max(step) for step in zip(*(r.step_seconds for r in record.ranks if r.step_seconds), strict=False)]
    per_step = record.setup.tokens_per_step_per_rank
    mfu = (f"MFU {record.mfu:.0%}",) if record.mfu is not None else ()
    spread = per_step / max(steps), per_step / min(steps)
    return _result((*mfu, *_marks(record)), (MEDIAN, tokens), spread=spread)


def communication_bar(record: TrialRecord) -> Bar:
    """Return the bar of a trial's communication seconds per step; exposed and overlapped add up to the total.

    Total and exposed are each the maximum over ranks; overlapped is their difference.
    """
    if record.outcome is not Outcome.OK:
        return _missing(ended(record))
    total, exposed = record.communication_seconds, record.exposed_communication_seconds
    if total is None or exposed is None:
        return _missing("unknown")
    percent = (f"{exposed / total:.0%}",) if total else ()
    return _result((*percent, *_marks(record)), (EXPOSED, exposed), (OVERLAPPED, max(total - exposed, 0.0)))


def ended(record: TrialRecord) -> str:
    """Return a short label for the outcome of a trial that did not end ok."""
    budget = record.outcome.is_oom and "budget" in _limits(record)
    return "OOM (budget)" if budget else _OUTCOME_LABELS[record.outcome]


def exceeded_limit(record: TrialRecord) -> int | None:
    """Return the bytes of device memory that a trial exceeded: the run's limit, else the GPU's; None if unknown."""
    if not record.outcome.is_oom or not _limits(record) & {"device", "budget"}:
        return None
    if record.run.gpu_limit_bytes is not None:
        return record.run.gpu_limit_bytes
    gpu = gpu_by_product_name(device_name(record) or "")
    return None if gpu is None else gpu.nvml_total_bytes or round(gpu.memory_gib * GIB)


def device_name(record: TrialRecord) -> str | None:
    """Return torch's name of the ranks' device; None if no rank got far enough to report it."""
    return next((rank.device_name for rank in record.ranks if rank.device_name != "unknown"), None)


def _marks(record: TrialRecord) -> tuple[str, ...]:
    """Return warnings about a trial that ended ok: allocation retries, suspect measurements."""
    return (() if record.fits else (RETRIES,)) + ((SUSPECT,) if record.suspect else ())


def _limits(record: TrialRecord) -> set[str]:
    """Return which memory ran out according to the ranks: device, budget or host."""
    return {r.failure.limit for r in record.ranks if r.failure and r.failure.limit and r.outcome.is_oom}
