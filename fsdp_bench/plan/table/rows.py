"""A prediction, or a setting of max-size, as a row of plain values. Columns have the names of the JSON document."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdp_bench.catalog.lookup import place_names
from fsdp_bench.plan.estimate import Verdict
from fsdp_bench.plan.question import Prediction, Question
from fsdp_bench.plan.table.columns import Row
from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.recording.model import code_of, lora_of
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES

if TYPE_CHECKING:
    from fsdp_bench.plan.max_size import SettingResult

SETUP_FIELDS = tuple(name for name, one in FIELDS.items() if one.of_step)
"""Fields that change memory or time."""


_PLACE = ("server", "gpu", "num_nodes", "gpus_per_node")
_ASKED = ("model", "code", "lora", "num_parameters", *_PLACE, "gpu_memory_bytes")


def _at_peak(category: str, found: Prediction) -> int:
    return found.estimate.memory.breakdown_bytes.get(category, 0)


_ANSWERED: dict[str, Callable[[Prediction], Any]] = {
    "fits": lambda found: found.fits,
    "verdict": lambda found: found.verdict and found.verdict.value,
    "exceeds": lambda found: exceeds(found),
    "peak_allocated_bytes": lambda found: found.estimate.memory.peak_allocated_bytes,
    "peak_phase": lambda found: found.estimate.memory.peak_phase,
    "peak_operator": lambda found: found.estimate.memory.peak_operator,
    "largest_category": lambda found: found.largest_category,
    **{f"{name}_at_peak_bytes": partial(_at_peak, name) for name in CATEGORIES},
    "peak_reserved_bytes": lambda found: found.reserved_bytes,
    "needed_bytes": lambda found: found.needed_bytes if found.question.kernels == "cuda" else None,
    "headroom_bytes": lambda found: found.headroom_bytes,
    "required_headroom_bytes": lambda found: found.required_headroom_bytes,
    "peak_host_bytes_per_node": lambda found: found.peak_host_bytes_per_node,
    "step_seconds": lambda found: found.speed.time.step_seconds,
    "compute_seconds": lambda found: found.speed.time.compute_seconds,
    "communication_seconds": lambda found: found.speed.time.communication_seconds,
    "exposed_communication_seconds": lambda found: found.speed.time.exposed_communication_seconds,
    "exposed_fraction": lambda found: _exposed_fraction(found),
    "tokens_per_second_per_gpu": lambda found: found.speed.tokens_per_second_per_gpu,
    "mfu": lambda found: found.speed.mfu,
    "hfu": lambda found: found.speed.hfu,
    "rates": lambda found: found.speed.source,
    "for_eager": lambda found: found.estimate.for_eager,
}
_TIMES = ("step_seconds", "compute_seconds", "communication_seconds", "exposed_communication_seconds")
_SPEED = (*_TIMES, "exposed_fraction", "tokens_per_second_per_gpu", "mfu", "hfu", "rates")
"""Columns that need a prediction of the step time."""
_SETUP = ("source", *_ASKED, *SETUP_FIELDS, "effective_strategy")

PREDICTION_COLUMNS = (*_SETUP, "impossible", *_ANSWERED)
"""The columns of ``predict`` of several setups."""

MAX_SIZE_COLUMNS = (
    *_SETUP,
    *("impossible", "unknown", "quantity", "fits_value", "runs_value", "num_hidden_layers", "hidden_size"),
    *("limited_by", "next_value", "next_needed_bytes"),
    *_ANSWERED,
)
"""The columns of ``max-size``."""


def exceeds(found: Prediction) -> str | None:
    """Return which memory a setup exceeds: ``gpu`` or ``host``; None if neither, or if that is not known."""
    if found.verdict in (None, Verdict.FITS):
        return None
    is_host = found.verdict is Verdict.DOES_NOT_FIT and found.estimate.allocator.out_of_memory is None
    return "host" if is_host else "gpu"


def _exposed_fraction(found: Prediction) -> float | None:
    """Return the fraction of a step in which collectives run and no operator does."""
    time = found.speed.time
    if time.step_seconds is None or time.exposed_communication_seconds is None:
        return None
    return time.exposed_communication_seconds / time.step_seconds


def prediction_row(found: Prediction, with_time: bool = True) -> Row:
    """Return a prediction as a row of PREDICTION_COLUMNS."""
    answers = {name: None if name in _SPEED and not with_time else read(found) for name, read in _ANSWERED.items()}
    return {**_asked(found.question), "impossible": None, **answers}


def refusal_row(question: Question) -> Row:
    """Return a setup that cannot run as a row of PREDICTION_COLUMNS: the reason, and nothing else of the answer."""
    return {**_asked(question), "impossible": question.impossible, **dict.fromkeys(_ANSWERED)}


def setting_row(cell: SettingResult, with_time: bool) -> Row:
    """Return a setting of max-size as a row of MAX_SIZE_COLUMNS: the largest value that fits, and its prediction."""
    from fsdp_bench.plan.max_size import limit_text  # which predict does not need

    at, beyond, limit = cell.at, cell.beyond, cell.limit
    row = dict.fromkeys(MAX_SIZE_COLUMNS) | (prediction_row(at, with_time) if at else _asked(cell.question))
    if at is None:
        row |= {"model": None, "num_parameters": None, "fits": False if cell.found else None}
    return row | {
        "impossible": cell.impossible,
        "unknown": cell.unknown,
        "quantity": cell.quantity.name,
        "fits_value": cell.fits,
        "runs_value": cell.runs,
        "num_hidden_layers": at.question.model.num_hidden_layers if at else None,
        "hidden_size": at.question.model.hidden_size if at else None,
        "limited_by": limit and limit_text(limit),
        "next_value": cell.quantity.values[cell.found.fits + 1] if beyond and cell.found else None,
        "next_needed_bytes": beyond.needed_bytes if beyond else None,
    }


def _asked(question: Question) -> Row:
    setup, lora = question.setup, lora_of(question.model)
    fields = to_builtins(setup)
    return {
        "source": "predicted",
        "model": question.model.name,
        "code": code_of(question.model),
        "lora": lora and lora.text(),
        "num_parameters": question.model.num_parameters,
        **dict(zip(_PLACE, place_names(question.hardware), strict=True)),
        "gpu_memory_bytes": question.gpu.usable_memory_bytes if question.gpu else None,
        **{name: fields[name] for name in SETUP_FIELDS},
        "effective_strategy": setup.effective_strategy.value,
    }
