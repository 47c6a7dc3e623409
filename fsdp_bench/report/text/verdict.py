"""Whether a setup fits, as text: one line, a word for a table, and the required headroom."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.rates.nccl_buffers import Bounds
from fsdp_bench.report.text.common import UNKNOWN, bounds_text
from fsdp_bench.simulate.step import STEPS
from fsdp_bench.spec.units import format_gib


def verdict(prediction: Prediction) -> str:
    """Return whether a setup fits, by how much, and why not if it does not."""
    is_known = prediction.fits is not None
    return ("in eager it " if is_known and prediction.for_eager else "") + _verdict(prediction)


def _verdict(prediction: Prediction) -> str:
    reading = prediction.allocator
    if prediction.question.kernels != "cuda":
        return "unknown whether it fits (predicted): kernels of a CPU; --kernels cuda for a GPU"
    if prediction.gpu_bytes is None:
        why = "no GPU is named; --server NAME or --gpu NAME"
        if prediction.gpu is not None:
            why = f"nobody documents how much of a {prediction.gpu.name} a process can use"
        return f"unknown whether it fits (predicted): {why}"
    if not prediction.knows_attention:
        lacks = (
            "torch has no FlashAttention for this GPU; peaks below assume it, because the model's code was not recorded"
            " without it"
        )
        if prediction.verdict is None:
            return f"unknown whether it fits (predicted): {lacks}"
        least = format_gib(prediction.least_bytes)
        return f"does not fit (predicted): {least} or more of {_available(prediction)} with any attention; {lacks}"
    reserved = f"reserved {format_gib(reading.peak_reserved_bytes)} of {format_gib(prediction.gpu_bytes)} usable"
    if prediction.verdict is Verdict.FITS:
        kept = prediction.required_headroom.num_bytes
        required = f"; {format_gib(kept)} of that kept free" if kept else ""
        return f"fits (predicted): {reserved}, {format_gib(prediction.headroom_bytes or 0)} left{required}"
    if prediction.verdict is None:
        return f"unknown whether it fits (predicted): the GPU's {reserved}; host memory of a node is not known"
    if reading.out_of_memory is not None:
        return f"does not fit (predicted): {_shortage(prediction)}"
    if prediction.verdict is Verdict.RUNS_WITH_RETRIES:
        retries = retries_text(reading.num_alloc_retries, reading.num_retries_later)
        return f"does not fit, but runs with {retries} (predicted): {_needed(prediction)}{_would_be_left(prediction)}"
    host, node = format_gib(prediction.host.peak_bytes), format_gib(prediction.host_memory_bytes or 0)
    return f"does not fit (predicted): {host} of host memory of {node} a node has; the GPU: {reserved}"


def required_lines(predictions: Iterable[Prediction]) -> list[str]:
    """Return the required headroom on each GPU and the option that changes it, one line per source."""
    by_source: dict[str, list[int]] = {}
    for kept in (one.required_headroom for one in predictions):
        by_source.setdefault(kept.source, []).append(kept.num_bytes)
    return [
        f"{bounds_text(Bounds(min(sizes), max(sizes)))} of each GPU kept free, {source}; --headroom SIZE changes it"
        for source, sizes in by_source.items()
    ]


def fits_text(prediction: Prediction) -> str:
    """Return whether a setup fits, in one to three words."""
    reading = prediction.allocator
    if prediction.verdict is Verdict.DOES_NOT_FIT and reading.out_of_memory is None:
        return "NO: host memory"
    texts = {Verdict.FITS: "yes", Verdict.RUNS_WITH_RETRIES: "NO: retries", Verdict.DOES_NOT_FIT: "NO"}
    return UNKNOWN if prediction.verdict is None else texts[prediction.verdict]


def retries_text(count: int, later: int | None) -> str:
    """Return the number of allocation retries in the first steps as text, and of each later step; None: unknown."""
    text = "1 allocation retry" if count == 1 else f"{count} allocation retries"
    if not count:
        return text
    afterwards = f"{UNKNOWN} later" if later is None else f"up to {later} in each later one" if later else "none later"
    return f"{text} in the first {STEPS} steps, {afterwards}"


def place_text(phase: str, block: int | None) -> str:
    """Return a phase, with the block if there is one."""
    return phase if block is None else f"{phase}, block {block}"


def _available(prediction: Prediction) -> str:
    kept, usable = prediction.required_headroom.num_bytes, f"{format_gib(prediction.gpu_bytes or 0)} usable"
    return f"{usable} less {format_gib(kept)} kept free" if kept else usable


def _needed(prediction: Prediction) -> str:
    memory, needed = prediction.memory, format_gib(prediction.needed_bytes)
    peak, available = format_gib(memory.peak_allocated_bytes), _available(prediction)
    if memory.peak_allocated_bytes <= (prediction.available_bytes or 0):
        return f"{available} would hold the peak of {peak}, but the allocator's segments need {needed}"
    mostly = prediction.largest_category.replace("_", " ")
    return f"{needed} reserved, {peak} of them allocated, of {available}, mostly {mostly}"


def _would_be_left(prediction: Prediction) -> str:
    left = prediction.headroom_bytes or 0
    return f"; {format_gib(left)} would be left" if left > 0 else ""


def _shortage(prediction: Prediction) -> str:
    full = prediction.allocator.out_of_memory
    assert full is not None
    where = place_text(full.phase, full.block if full.block >= 0 else None)
    return f"{_needed(prediction)}{_would_be_left(prediction)}; it runs out in {where} at {full.label}"
