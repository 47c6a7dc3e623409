"""Several predictions as one table: the conclusion, then one row per setup, the fastest that fits first."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.question import Prediction, Question
from fsdp_bench.report.table import table_columns, table_lines
from fsdp_bench.report.text.common import UNKNOWN, fact
from fsdp_bench.report.text.prediction import (
    common_line,
    hardware_facts,
    header_of,
    labels,
    modelled,
    required_facts,
    spaced,
    title,
    varying_fields,
)
from fsdp_bench.report.text.speed import SPEED_COLUMNS, rests_on, speed_cells, step_text
from fsdp_bench.report.text.verdict import fits_text, verdict
from fsdp_bench.spec.units import format_gib

DROPPABLE = ("exposed", "peak\nallocated", "left", "in phase", "MFU", "mostly", "step", "tokens/s\nper GPU")
"""Headers of columns to leave out if the terminal is too narrow, in this order."""


def side_by_side(predictions: Sequence[Prediction], refused: Sequence[Question]) -> str:
    """Return the conclusion and one row per setup, for several setups of one model on the same hardware.

    Setups that fit come first, sorted by speed.
    """
    questions = [*(prediction.question for prediction in predictions), *refused]
    varying = varying_fields(questions)
    speeds = [header.replace("tokens/s ", "tokens/s\n") for header in SPEED_COLUMNS]
    peaks = ["peak\nallocated", "in phase", "needs", "fits", "left", "mostly"]
    headers = ["strategy", *map(header_of, varying), *peaks, *speeds]
    rows = [[*labels(p.question, varying), *_cells(p)] for p in sorted(predictions, key=_order)]
    numbers = {"peak\nallocated", "needs", "left", *speeds}
    first = questions[0]
    lines = [
        conclusion(predictions, varying),
        "",
        fact("predicted", f"{len(predictions)} setups; peaks of rank 0 on one GPU"),
        fact("model", f"{first.model.name}: {first.model.describe()}"),
        fact("setup", common_line(first.setup, varying)),
        *hardware_facts(first),
        fact("modelled", modelled(first)),
        fact("rates", rests_on(predictions[0].speed, first.profile)),
        fact("needs", "what the allocator reserves without retries; left: what the GPU has beyond that"),
        *required_facts(predictions),
        "",
        *table_lines(table_columns(headers, rows, numbers, DROPPABLE)),
    ]
    if refused:
        lines.append("")
        lines += [f"impossible: {title(q, varying)}: {q.impossible}" for q in refused]
    notes = dict.fromkeys(note for prediction in predictions for note in prediction.notes)
    lines += ["", *(fact("note", note) for note in notes)] if notes else []
    return "\n".join(lines)


_RANK = {Verdict.FITS: 0, None: 1, Verdict.RUNS_WITH_RETRIES: 2, Verdict.DOES_NOT_FIT: 3}


def _order(prediction: Prediction) -> tuple[int, float, int]:
    """Return the sort key of a row: whether the setup fits, then its step time, then its memory."""
    seconds = prediction.speed.time.step_seconds if prediction.fits is not False else None
    return _RANK[prediction.verdict], inf if seconds is None else seconds, prediction.needed_bytes


def conclusion(predictions: Sequence[Prediction], varying: Sequence[str]) -> str:
    """Return one sentence about the fastest setup that fits, or about the nearest one if none fits."""
    best = min(predictions, key=_order)
    name, fitting = title(best.question, varying), [one for one in predictions if one.fits]
    if not fitting and best.fits is None:
        return f"whether any fits is unknown (predicted): {verdict(best).partition(': ')[2]}"
    if not fitting:
        least = min(predictions, key=lambda one: one.needed_bytes)
        name, needs = title(least.question, varying), format_gib(least.needed_bytes)
        return f"none of {len(predictions)} fits (predicted); {name} is nearest and needs {needs}"
    of = f"of the {len(fitting)} that fit" if len(fitting) > 1 else "the only one that fits"
    reserved = f"{format_gib(best.needed_bytes)} reserved"
    time, tokens = best.speed.time.step_seconds, best.speed.tokens_per_second_per_gpu
    if time is None or tokens is None:
        least = min(fitting, key=lambda one: one.needed_bytes)
        name, reserved = title(least.question, varying), f"{format_gib(least.needed_bytes)} reserved"
        return f"{of}, {name} needs the least memory (predicted): {reserved}; times are unknown"
    fastest = "is the fastest" if len(fitting) > 1 else "trains"
    speed = f"{step_text(time)} a step, {tokens:,.0f} tokens/s per GPU"
    return f"{of}, {name} {fastest} (predicted): {speed}, {reserved}"


def _cells(prediction: Prediction) -> list[str]:
    memory = prediction.estimate.memory
    largest = prediction.largest_category
    fraction = memory.breakdown_bytes[largest] / memory.peak_allocated_bytes
    return [
        format_gib(memory.peak_allocated_bytes),
        memory.peak_phase,
        _size(prediction.needed_bytes if prediction.question.kernels == "cuda" else None, UNKNOWN),
        fits_text(prediction),
        _size(prediction.headroom_bytes, UNKNOWN),
        f"{spaced(largest)} {fraction:.0%}",
        *(["-"] * len(SPEED_COLUMNS) if prediction.fits is False else speed_cells(prediction.speed)),
    ]


def _size(num_bytes: int | None, otherwise: str) -> str:
    return otherwise if num_bytes is None else format_gib(num_bytes)
