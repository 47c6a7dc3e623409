"""FrontierRecord: the measured largest model of every cell of a frontier sweep, beside what was predicted.

Written to ``frontier.json`` beside the trials that it was read from; it can be rebuilt from them at any time.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fsdp_bench.spec.errors import SpecError, not_allowed
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.setup import Offload, TrainSetup
from fsdp_bench.spec.units import format_count

FRONTIER_SCHEMA_VERSION = 1

Status = Literal["found", "unknown", "not searched", "skipped"]


_UNITS = {"num_hidden_layers": "layer", "micro_batch_size": "sequence", "sequence_length": "token"}


class QuantityRange(msgspec.Struct, frozen=True, kw_only=True):
    """The quantity that a search raises, and its range.

    Raises:
        SpecError: for a name that is no quantity.
    """

    name: str
    """num_parameters (the size ladder), num_hidden_layers, micro_batch_size or sequence_length."""
    smallest: int
    largest: int
    num_steps: int

    def print(self, value: int) -> str:
        """Return a value with its unit; 0 stands for none."""
        if value == 0:
            return "none"
        if self.name == "num_parameters":
            return format_count(value)
        return f"{value} {_UNITS[self.name]}{'' if value == 1 else 's'}"

    def __post_init__(self) -> None:
        if self.name not in ("num_parameters", *_UNITS):
            raise not_allowed("dial", self.name, ["num_parameters", *_UNITS])


class FirstFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that ran out at the value above the largest that fits."""

    value: int
    """The quantity's value there."""
    place: str
    """``card`` (the GPU), ``budget`` (a memory limit on a CPU) or ``host``."""
    phase: str
    """Measured: where it first ran out. Predicted, or ended with retries: where the peak is, which may be later.
    ``unknown`` where it is not known."""
    ran_out: bool
    """Whether it ran out of memory; else it ended with allocation retries."""
    trial_id: str | None = None
    """The trial that showed it; None when it is predicted."""


class LargestValues(msgspec.Struct, frozen=True, kw_only=True):
    """The largest values of the quantity that fit and that run; 0 where not even the smallest does."""

    fits: int
    """The largest that ends without allocation retries."""
    runs: int
    """The largest that ends without running out of memory. On a CPU the same."""
    num_parameters: int
    """Of the model that fits; 0 for none."""
    limited_by: FirstFailure | None
    """None when the range ends before memory does."""


class FrontierCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: the question, the predicted answer, the measured one."""

    label: str
    setup: TrainSetup
    """The field that is raised has no meaning here."""
    quantity: QuantityRange = msgspec.field(name="dial")
    """What is searched, and its range; ``dial`` in the file."""
    family: Family
    vocab_size: int
    model: ModelShape | None
    """None when the model's size is raised."""
    status: Status
    """``unknown``: a trial ended otherwise than ok or out of memory. ``not searched``: not to the end, so far."""
    reason: str | None
    """One line: why the status is not ``found``, and what is skipped above what ran out."""
    predicted: LargestValues | None
    """None when the GPU is not in the catalogue, or the setup cannot be predicted."""
    measured: LargestValues | None
    """None unless the status is ``found``."""
    steps_apart: int | None
    """Steps from the predicted to the measured largest that fits; negative when less fits."""
    trials: tuple[str, ...]
    """IDs of the cell's trials that ended ok or out of memory, from small to large."""
    most_trials: int
    """Trials that bisection would take for ``fits``."""


class FrontierRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One frontier sweep: ``frontier.json``."""

    schema_version: int
    sweep: str
    source: Literal["measured"]
    device: Device
    machine: str
    """One line that describes it."""
    run: RunPlan
    """How every trial was run; its memory_limit_bytes stood for the GPU's memory."""
    gpu_is_limited: bool = msgspec.field(name="card_is_limited")
    """Whether --gpu-memory made a large GPU as small as another one."""
    cells: tuple[FrontierCell, ...]


def cell_label(setup: TrainSetup, name: str, quantity_name: str) -> str:
    """Return a cell in one line: its model or family, and the setup without what is raised."""
    parts = [name, f"world {setup.world_size}", setup.strategy.value, setup.api.value, str(setup.precision)]
    parts.append(f"checkpointing {setup.checkpointing.value}")
    if setup.offload is Offload.PARAMS:
        parts.append("offload")
    batch = "" if quantity_name == "micro_batch_size" else f" {setup.micro_batch_size}"
    tokens = "" if quantity_name == "sequence_length" else f" x {setup.sequence_length}"
    return " ".join([*parts, f"batch{batch}{tokens}"])


def read_frontier(data: bytes, name: str) -> FrontierRecord:
    """Decode frontier.json.

    Raises:
        msgspec.DecodeError: when the bytes are not a whole record.
        SpecError: naming the file, when it was written by a newer fsdp-bench.
    """
    from fsdp_bench.spec.codec import decode, from_stored

    raw = decode(data)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise msgspec.ValidationError(f"{name} has no schema_version")
    if version > FRONTIER_SCHEMA_VERSION:
        raise SpecError(
            f"{name}: schema_version {version} was written by a newer fsdp-bench; this one reads up to"
            f" {FRONTIER_SCHEMA_VERSION}. Upgrade fsdp-bench"
        )
    return from_stored(raw, FrontierRecord)
