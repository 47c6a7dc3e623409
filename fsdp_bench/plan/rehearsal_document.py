"""The JSON form of a rehearsal, with the keys of ``predict --json`` where they mean the same; null is unknown."""

import os
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.plan.document import Bytes, HardwareDocument, hardware_document
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.rehearsal import Rehearsal, WhyUnknown
from fsdp_bench.plan.rehearsed_time.answer import RehearsedTimeDocument, rehearsed_time_document
from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.files import read_document
from fsdp_bench.spec.subprocesses.rehearsal import GpuRead, HeldLine, PhasePeaks, RehearsalOutcome, ScriptFailure

REHEARSED = "rehearsed"


class RehearsedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one GPU."""

    peak_allocated_bytes: Bytes | None
    peak_reserved_bytes: Bytes | None
    peak_phase: str | None
    peak_step: int | None
    phases: dict[str, Bytes]
    first_step: PhasePeaks | None
    """The peak of the first step, which includes loading."""
    steady_state: PhasePeaks | None
    """The peak of the later steps."""
    num_alloc_retries: int
    communicators_bytes: tuple[Bytes, Bytes] | None
    """The least and the most GPU memory that NCCL takes."""
    lines_at_peak: tuple[HeldLine, ...] | None
    """The largest first. None if PyTorch's memory history is incomplete."""


class RehearsedHost(msgspec.Struct, frozen=True, kw_only=True):
    """The host memory of one rank."""

    peak_bytes: Bytes
    """Taken by the rehearsal itself."""
    peak_bytes_of_real_run: Bytes


class RehearsalDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one rank of a command. Defaults are of documents of older versions, which lack the key."""

    source: str = REHEARSED
    torch: str
    cuda: str
    command: str
    """The command, and the rank that was run instead, in one line."""
    folder: str | None = None
    """The folder in which the command ran; files below it are the same files in another checkout."""
    world_size: int
    rank: int
    outcome: RehearsalOutcome
    num_steps: int
    server: HardwareDocument
    memory: RehearsedMemory
    time: RehearsedTimeDocument | None
    """None if nobody asked, or if no whole step after the first was seen (``why_no_time``)."""
    why_no_time: str | None
    host: RehearsedHost
    reads: tuple[GpuRead, ...]
    num_known_reads: int
    unsupported: dict[str, int]
    """Functions that the stand-in for NVIDIA's libraries lacks, with how often they were called."""
    notes: tuple[str, ...]
    allocator_settings: str | None
    failure: ScriptFailure | None
    fits: bool | None
    verdict: Verdict | None
    why_unknown: WhyUnknown | None = None
    """Why that is unknown."""
    headroom_bytes: int | None
    required_headroom_bytes: Bytes
    spans: tuple[PhasePeaks, ...]


def rehearsal_document(found: Rehearsal) -> RehearsalDocument:
    """Return the JSON form of a rehearsal that ran in the current folder."""
    report, peak = found.report, found.report.peak
    out_of_memory = report.outcome is RehearsalOutcome.OUT_OF_MEMORY
    communicators = found.communicators
    phases: dict[str, int] = {}
    for span in report.spans:
        phases[span.phase] = max(span.allocated_bytes, phases.get(span.phase, 0))
    is_known = peak is not None and not out_of_memory and not report.num_alloc_retries
    nccl = communicators.num_bytes if communicators is not None else None
    return RehearsalDocument(
        **{name: getattr(report, name) for name in _OF_REPORT},
        command=report.sentence,
        folder=os.getcwd(),
        server=hardware_document(found.hardware),
        memory=RehearsedMemory(
            peak_allocated_bytes=peak.allocated_bytes if peak else None,
            peak_reserved_bytes=found.reserved_bytes,
            peak_phase=peak.phase if peak else None,
            peak_step=peak.step if peak else None,
            phases=phases,
            first_step=found.first_step,
            steady_state=found.steady_state,
            num_alloc_retries=report.num_alloc_retries,
            communicators_bytes=(nccl.low, nccl.high) if nccl is not None else None,
            lines_at_peak=report.lines_at_peak,
        ),
        time=rehearsed_time_document(found.time),
        why_no_time=found.why_no_time,
        host=RehearsedHost(
            peak_bytes=report.peak_host_bytes,
            peak_bytes_of_real_run=report.peak_host_bytes + report.peak_unwritten_host_bytes,
        ),
        fits=found.fits,
        verdict=found.verdict,
        why_unknown=found.why_unknown if found.verdict is None else None,
        headroom_bytes=found.usable_bytes - report.peak_reserved_bytes if is_known else None,
        required_headroom_bytes=found.kept_free.num_bytes,
    )


_OF_REPORT = (
    *("torch", "cuda", "world_size", "rank", "outcome", "num_steps", "reads", "num_known_reads", "unsupported"),
    *("notes", "allocator_settings", "failure", "spans"),
)
"""The fields that the document has as the report has them."""


def is_rehearsal(document: Any) -> bool:
    """Whether a JSON document is of ``rehearse --json``: of one rank, of several ranks, or of several commands."""
    first = _each(document)[:1]
    return bool(first) and isinstance(first[0], dict) and first[0].get("source") == REHEARSED and "outcome" in first[0]


def _each(document: Any) -> list[Any]:
    if not isinstance(document, dict):
        return []
    if isinstance(several := document.get("rehearsals"), list):
        return [rank for one in several for rank in _each(one)]
    ranks = document.get("ranks", [document])
    return ranks if isinstance(ranks, list) else []


def read_rehearsals(path: Path) -> tuple[RehearsalDocument, ...]:
    """Read the file of ``rehearse --json``: a document for each rank. Raises SpecError for another file."""
    found = read_document(path, "JSON")
    if not is_rehearsal(found):
        raise SpecError(f"{path}: is no document of rehearse --json")
    try:
        return from_builtins(_each(found), tuple[RehearsalDocument, ...])
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: is no document of rehearse --json: {error}") from None
