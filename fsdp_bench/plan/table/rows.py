"""An answer, or a setting of max-size, as a row of plain values. Columns have the names of the JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import asdict

from fsdp_bench.plan.document import AnswerDocument, TimeDocument, answer_document, refusal_document
from fsdp_bench.plan.table.columns import Row
from fsdp_bench.spec.setup import FIELDS
from fsdp_bench.spec.subprocesses.dry_run import CATEGORIES

if TYPE_CHECKING:
    from fsdp_bench.plan.max_size import SettingResult

SETUP_FIELDS = tuple(name for name, one in FIELDS.items() if one.of_step)
"""Fields that change memory or time."""

_PLACE = ("gpu", "num_nodes", "gpus_per_node", "gpu_memory_bytes")
_SETUP = (
    *("source", "model", "code", "lora", "num_parameters", "server", *_PLACE, *SETUP_FIELDS, "effective_strategy"),
    "impossible",
)
_FIT = ("fits", "verdict", "exceeds", "headroom_bytes", "required_headroom_bytes", "for_eager")
_AT_PEAK = {f"{category}_at_peak_bytes": category for category in CATEGORIES}
_ANSWERED = (
    *("fits", "verdict", "exceeds", "peak_allocated_bytes", "peak_phase", "peak_operator", "largest_category"),
    *_AT_PEAK,
    *("peak_reserved_bytes", "needed_bytes", "headroom_bytes", "required_headroom_bytes", "peak_host_bytes_per_node"),
    *("step_seconds", "compute_seconds", "communication_seconds", "exposed_communication_seconds", "exposed_fraction"),
    *("tokens_per_second_per_gpu", "mfu", "hfu", "rates", "for_eager"),
)

PREDICTION_COLUMNS = (*_SETUP, *_ANSWERED)
"""The columns of ``predict`` of several setups."""

MAX_SIZE_COLUMNS = (
    *_SETUP,
    *("unknown", "quantity", "fits_value", "runs_value", "num_hidden_layers", "hidden_size"),
    *("limited_by", "next_value", "next_needed_bytes"),
    *_ANSWERED,
)
"""The columns of ``max-size``."""


def answer_row(found: AnswerDocument) -> Row:
    """Return an answer as a row of PREDICTION_COLUMNS; of a setup that cannot run, the reason and nothing else."""
    memory, time, model = found.memory, found.time or TimeDocument(), found.model
    values = {
        **found.setup,
        **asdict(time),
        "exposed_fraction": time.exposed_fraction,
        **{name: getattr(found, name) for name in ("source", "impossible", *_FIT)},
        **{name: getattr(found.server, name) for name in _PLACE},
        **{"server": found.server.name, "model": model.name, "code": model.code},
        **{"lora": model.lora and model.lora.text(), "num_parameters": model.num_parameters},
    }
    if memory is not None:
        values |= {**asdict(memory), "largest_category": memory.largest_category}
        values |= {name: memory.breakdown_bytes.get(category, 0) for name, category in _AT_PEAK.items()}
    return {name: values.get(name) for name in PREDICTION_COLUMNS}


def setting_row(cell: SettingResult, with_time: bool) -> Row:
    """Return a setting of max-size as a row of MAX_SIZE_COLUMNS: the largest value that fits, and its prediction."""
    from fsdp_bench.plan.max_size import limit_text  # which predict does not need

    at, beyond, limit = cell.at, cell.beyond, cell.limit
    found = answer_document(at, with_time, with_communication=False) if at else refusal_document(cell.question)
    row = dict.fromkeys(MAX_SIZE_COLUMNS) | answer_row(found)
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
