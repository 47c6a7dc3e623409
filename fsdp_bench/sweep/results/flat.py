"""Records as rows: trials.csv and load_results, frontier.csv, a step's communication by kind of collective."""

import statistics
from typing import Any

import msgspec

from fsdp_bench.spec.codec import to_builtins
from fsdp_bench.spec.frontier import FrontierCell, FrontierRecord
from fsdp_bench.spec.rank_report import CollectiveReading, Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import distinct_labels

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a formula of a spreadsheet begins (OWASP, CSV Injection)."""


def flat_row(record: TrialRecord) -> dict[str, Any]:
    """Return a record as one row: ID, model, setup, outcome, the highest memory of any rank, median times.

    ``loss`` is the setup's cross-entropy (plain, chunked, compiled, ...); ``final_loss`` is the number it reached.
    """
    return {
        **{name: getattr(record, name) for name in ("id", "sweep", "source", "device")},
        "outcome": record.outcome.value,
        "fits": record.fits,
        "reason": record.reason,
        "suspect": "; ".join(record.suspect) or None,
        **_model_and_setup(record),
        "num_nodes": record.num_nodes,
        "memory_limit_bytes": record.run.memory_limit_bytes,
        **_memory(record),
        **_speed(record),
        "final_loss": record.final_loss,
        "torch": next((rank.environment.get("torch") for rank in record.ranks if rank.environment), None),
        "started_at": record.started_at,
        "wall_seconds": record.wall_seconds,
    }


def _model_and_setup(record: TrialRecord) -> dict[str, Any]:
    setup = to_builtins(record.setup)
    setup["requested_strategy"] = setup.pop("strategy")
    return {
        "model": record.model.name,
        "family": record.model.kind,
        "num_parameters": record.num_parameters,
        "num_hidden_layers": record.model.num_hidden_layers,
        "hidden_size": record.model.hidden_size,
        "vocab_size": record.model.vocab_size,
        "strategy": record.setup.strategy.value,
        "effective_strategy": record.effective_strategy,
        **setup,
    }


_MOST_OF_ANY_RANK = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
    "peak_host_bytes",
    "num_alloc_retries",
    "num_ooms",
    "parameters_bytes",
    "gradients_bytes",
    "optimizer_state_bytes",
)
"""Fields of MemoryReading. Each column has the largest value of any rank."""
_WITH_RANK = ("peak_allocated_bytes", "peak_reserved_bytes", "num_alloc_retries")
"""Fields with a second column: the rank with the largest value."""


def _memory(record: TrialRecord) -> dict[str, Any]:
    """Return the largest value of any rank for each field. The phase is that of the largest peak allocated."""
    worst = record.worst_rank_memory
    row: dict[str, Any] = {}
    for field in _MOST_OF_ANY_RANK:
        most, rank = most_of_any_rank(record, field)
        row[field] = most
        if field in _WITH_RANK:
            row[f"{field.removesuffix('_bytes')}_rank"] = rank
    effective = next((rank.effective for rank in record.ranks if rank.effective), None)
    return {**row, "peak_phase": worst and worst.peak_phase, "num_units": effective and effective.num_units}


def most_of_any_rank(record: TrialRecord, field: str) -> tuple[int | None, int | None]:
    """Return the largest value of a field and the first rank with it. Both are None if no rank has a value."""
    known = [(getattr(rank.memory, field), -rank.rank) for rank in record.ranks if rank.memory]
    value, negated = max(((value, rank) for value, rank in known if value is not None), default=(None, None))
    return value, None if negated is None else -negated


_SPEED = (
    *("step_seconds", "tokens_per_second_per_gpu", "model_tflops_per_second", "mfu", "hfu", "peak_flops_source"),
    *("communication_seconds", "exposed_communication_seconds", "seconds_without_communication"),
    "exposed_by_difference_seconds",
)
"""Columns of time, which but for ``model_tflops_per_second`` are fields of TrialRecord."""


def _speed(record: TrialRecord) -> dict[str, Any]:
    flops = record.model_flops_per_second
    row = {name: getattr(record, name, None) for name in _SPEED}
    return {**row, "model_tflops_per_second": None if flops is None else flops * 1e-12}


def frontier_row(cell: FrontierCell, record: FrontierRecord) -> dict[str, Any]:
    """Return a cell as one row: setup, searched quantity, both limits predicted and measured, number of trials."""
    predicted, measured = cell.predicted, cell.measured
    failure = measured.limited_by if measured else None
    setup = to_builtins(cell.setup)
    setup.pop(cell.quantity.name, None)
    return {
        "cell": cell.label,
        "sweep": record.sweep,
        "source": record.source,
        "device": record.device,
        "machine": record.machine,
        "memory_limit_bytes": record.run.memory_limit_bytes,
        "card_is_limited": record.gpu_is_limited,
        "model": cell.model.name if cell.model else None,
        "family": cell.family.value,
        "vocab_size": cell.vocab_size,
        **setup,
        "dial": cell.quantity.name,
        "num_steps": cell.quantity.num_steps,
        "status": cell.status,
        "reason": cell.reason,
        "predicted_fits": predicted.fits if predicted else None,
        "measured_fits": measured.fits if measured else None,
        "steps_apart": cell.steps_apart,
        "predicted_runs": predicted.runs if predicted else None,
        "measured_runs": measured.runs if measured else None,
        "measured_num_parameters": measured.num_parameters if measured else None,
        "limited_by_place": failure.place if failure else None,
        "limited_by_phase": failure.phase if failure else None,
        "trials": len(cell.trials),
        "most_trials": cell.most_trials,
    }


def csv_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is written to a CSV file: text that a spreadsheet would run as a formula begins with ``'``."""
    return {
        column: f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
        for column, value in row.items()
    }


_COMMUNICATION = (
    *("step_seconds", "seconds_without_communication", "communication_seconds", "exposed_communication_seconds"),
    "exposed_by_difference_seconds",
)
"""Fields of TrialRecord that say how long a step and its communication take."""


def communication_rows(records: list[TrialRecord]) -> list[dict[str, Any]]:
    """Return the JSON form for the trials that ended ``ok``. Sizes are in bytes, times in seconds."""
    measured = [record for record in records if record.outcome is Outcome.OK]
    return [
        {
            "id": record.id,
            "label": label,
            "device": record.device,
            **{name: getattr(record, name) for name in _COMMUNICATION},
            "exposed_shares": record.exposed_fractions,
            "collectives": [
                {
                    **{
                        name: getattr(kind, name)
                        for name in ("kind", "calls", "message_bytes", "group_size", "seconds")
                    },
                    "algorithm_bandwidth_bytes_per_second": kind.algorithm_bandwidth,
                    "bus_bandwidth_bytes_per_second": kind.bus_bandwidth,
                }
                for kind in kinds_of(record)
            ],
        }
        for record, label in zip(measured, trial_labels(measured), strict=True)
    ]


def kinds_of(record: TrialRecord) -> list[CollectiveReading]:
    """Return one reading for each kind: the median over profiled steps, of the rank with the most seconds."""
    found: dict[str, CollectiveReading] = {}
    for rank in record.ranks:
        by_kind: dict[str, list[CollectiveReading]] = {}
        for reading in (reading for step in rank.communication for reading in step.collectives):
            by_kind.setdefault(reading.kind, []).append(reading)
        for name, readings in by_kind.items():
            seconds = [reading.seconds for reading in readings if reading.seconds is not None]
            median = float(statistics.median(seconds)) if seconds else None
            if name not in found or (median or 0.0) > (found[name].seconds or 0.0):
                found[name] = msgspec.structs.replace(readings[0], seconds=median)
    return [found[name] for name in sorted(found)]


def trial_labels(records: list[TrialRecord]) -> list[str]:
    """Return a label for each trial that distinguishes it from the others."""
    return distinct_labels([(record.model, record.setup, record.alone) for record in records])
