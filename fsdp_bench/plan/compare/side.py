"""Side: one of two things to compare, whatever it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fsdp_bench.catalog.loader import BUILT_IN
from fsdp_bench.plan.document import AnswerDocument, TimeDocument
from fsdp_bench.plan.prediction import Prediction
from fsdp_bench.spec.checked import build
from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.errors import ResultsError, SpecError, shown
from fsdp_bench.spec.files import read_document
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.spec.setup import TrainSetup

KINDS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "needed": "needed_bytes",
    "device": "peak_device_bytes",
    "host, of a node": "peak_host_bytes_per_node",
    "host, of a rank": "peak_host_bytes",
}
"""Peaks by kind, which are never compared with each other, each with its key in documents and records.

``needed`` is what the allocator reserves on a GPU of unlimited memory: without retries."""
PARTS = ("compute_seconds", "exposed_communication_seconds")
"""Parts of a step that follow each other; the rest of it is copies, an optimizer on the CPU, or waiting."""
TIMES = ("step_seconds", *PARTS, "communication_seconds", "host_copy_seconds", "cpu_optimizer_seconds")
_SIZES = ("family", "num_hidden_layers", "hidden_size")


@dataclass(frozen=True)
class Side:
    """One of two setups or results."""

    name: str
    source: str
    """``predicted``, ``dry-run``, ``measured`` or ``rehearsed``."""
    model: str
    shape: tuple[Any, ...] | None
    """The model, whatever its name: its code, sizes and number of parameters. None if that is not known."""
    setup: TrainSetup
    facts: Mapping[str, Any]
    """Whatever else the numbers depend on: hardware, kernels, versions. None for what is not known."""
    peaks: Mapping[str, int]
    """Known peaks by their kind."""
    reserved_source: str
    """The source of reserved memory; a dry run's is predicted."""
    phases: Mapping[str, int]
    peak_phase: str | None
    peak_place: str | None
    """The operator at the peak, with its block. None if it is not known."""
    breakdown: Mapping[str, int] | None
    """Bytes at the peak by category. None if it is not known."""
    times: Mapping[str, float]
    tokens_per_second_per_gpu: float | None
    collectives: Mapping[str, Mapping[str, Any]]
    """The communication of a step, by kind and group: calls, bytes, seconds."""
    verdict: str | None
    stopped: str | None = None
    """The way it ended, if not as it should: its peaks are then what it had reached."""

    @property
    def strategy(self) -> str:
        """The strategy that runs."""
        return self.setup.effective_strategy.value

    @property
    def reached(self) -> str:
        """The source as it is printed beside a number."""
        return self.source.replace("-", " ")


Comparable = str | Path | Mapping[str, Any] | TrialRecord | Prediction | Side
"""The things that ``compare`` takes as a model in a setup."""


def read_side(value: Comparable, name: str) -> Side:
    """Read what is to be compared.

    Raises SpecError for anything else or without memory, ResultsError for a broken record.
    """
    if isinstance(value, Side):
        return value
    if isinstance(value, str | Path):
        return _of_file(Path(value))
    if isinstance(value, Prediction):
        return _side(value.document(), name)
    if isinstance(value, TrialRecord):
        return _of_record(value, name)
    if not isinstance(value, Mapping):
        raise SpecError(f"{name}: {shown(value)} is not allowed; a document of predict --json or a record of a trial")
    return _of_document(value, name)


def _of_file(path: Path) -> Side:
    """Read a file: one document, one of several as FILE#2, or a record."""
    file, _, number = str(path).partition("#")
    found = read_document(Path(file), "JSON")
    if isinstance(found, dict) and "schema_version" in found:
        try:
            return _of_record(read_record(Path(file).read_bytes(), Path(file).name), Path(file).name)
        except msgspec.DecodeError as error:
            raise ResultsError(f"{file}: not a whole record ({str(error).splitlines()[0]})") from None
    several = next(
        (found[key] for key in ("predictions", "dry_runs") if isinstance(found, dict) and key in found), None
    )
    if not isinstance(several, list):
        return _of_document(found, path.name)
    if not number.isdecimal() or not 1 <= int(number) <= len(several):
        raise SpecError(f"{file}: holds {len(several)} setups; name one: {file}#1 to {file}#{len(several)}")
    return _of_document(several[int(number) - 1], path.name)


def _of_document(found: Any, name: str) -> Side:
    if isinstance(found, Mapping) and (found.get("error") or found.get("impossible")):
        raise SpecError(f"{name}: has no numbers to compare: {found.get('error') or found['impossible']}")
    if not isinstance(found, Mapping) or not isinstance(found.get("memory"), Mapping):
        raise SpecError(f"{name}: is neither a document of predict --json or dry-run --json nor a record of a trial")
    try:
        return _side(from_builtins(found, AnswerDocument), name)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None
    except msgspec.ValidationError as error:
        raise SpecError(f"{name}: is no document of predict --json or dry-run --json: {error}") from None


def _side(found: AnswerDocument, name: str) -> Side:
    memory, time, server, model = found.memory, found.time or TimeDocument(), found.server, found.model
    assert memory is not None
    return Side(
        name=name,
        source=found.source,
        model=model.name,
        shape=_shape(tuple(getattr(model, key) for key in (*_SIZES, "num_parameters"))),
        setup=read_setup(found.setup),
        facts={
            **{key: getattr(server, key) for key in ("gpu", "num_nodes", "gpus_per_node", "gpu_memory_bytes")},
            **{key: getattr(found, key) for key in ("torch", "kernels", "expandable_segments", "load")},
            **{"server": server.name, "gpu_power_watts": server.stated_power_watts, "rates": time.rates},
        },
        peaks=_known(memory, KINDS),
        reserved_source=memory.peak_reserved_source or found.source,
        phases=memory.phases,
        peak_phase=memory.peak_phase,
        peak_place=memory.peak_place,
        breakdown=memory.breakdown_bytes,
        times=_known(time, dict(zip(TIMES, TIMES, strict=True))),
        tokens_per_second_per_gpu=time.tokens_per_second_per_gpu,
        collectives={
            f"{one.kind} ({one.group})": {key: getattr(one, key) for key in ("calls", "message_bytes", "seconds")}
            for one in found.communication or ()
        },
        verdict=found.verdict,
    )


def _known(numbers: object, keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, key in keys.items() if (value := getattr(numbers, key, None)) is not None}


def _shape(sizes: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return None if None in sizes else sizes


def _gpu_name(product: str) -> str | None:
    """Return the catalogue's name of a GPU that calls itself ``product``; None for a CPU."""
    if product.lower() in ("cpu", "unknown"):
        return None
    return next((gpu.name for gpu in BUILT_IN.gpus() if product in gpu.product_names), product)


def read_setup(fields: Mapping[str, Any]) -> TrainSetup:
    """Return the setup of a document or record; a shard size that its strategy ignores is dropped. Raises SpecError."""
    known = {name: fields[name] for name in TrainSetup.__struct_fields__ if fields.get(name) is not None}
    written = build(TrainSetup, {**known, "shard_size": None})
    return build(TrainSetup, known) if written.strategy.is_hybrid else written


def _of_record(record: TrialRecord, name: str) -> Side:
    worst = record.worst_rank_memory
    if worst is None or worst.peak_allocated_bytes is None:
        raise SpecError(f"{name}: no memory was measured; it ended as {record.outcome.value}: {record.reason}")
    readings = [rank.memory for rank in record.ranks if rank.memory]
    peaks = {
        kind: max(known)
        for kind, key in KINDS.items()
        if (known := [size for one in readings if (size := getattr(one, key, None)) is not None])
    }
    ended_well = record.outcome.value == "ok"
    environment = next((rank.environment for rank in record.ranks if rank.environment), {})
    gpu = record.run.rehearsed_on.name if record.run.rehearsed_on else _gpu_name(record.ranks[0].device_name)
    return Side(
        name=name,
        source=record.source,
        model=record.model.name,
        shape=_shape((*(getattr(record.model, key, None) for key in _SIZES), record.num_parameters)),
        setup=read_setup(msgspec.structs.asdict(record.setup)),
        facts={
            **{"server": None, "gpu": gpu, "kernels": record.hardware, "torch": environment.get("torch")},
            "alone": record.alone or None,
        },
        peaks=peaks,
        reserved_source=record.source,
        phases=dict(worst.phases),
        peak_phase=worst.peak_phase,
        peak_place=None,
        breakdown=None,
        times=_known(record, dict(zip(TIMES, TIMES, strict=True))),
        tokens_per_second_per_gpu=record.tokens_per_second_per_gpu,
        collectives={},
        verdict="fits" if record.fits else None,
        stopped=None if ended_well else record.outcome.value,
    )
