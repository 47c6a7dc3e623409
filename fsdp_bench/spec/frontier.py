"""FrontierRecord: measured and predicted largest models of a sweep: ``frontier.json``, rebuilt from trials' records."""

from typing import Literal

import msgspec

from fsdp_bench.spec.codec import from_versioned
from fsdp_bench.spec.errors import not_allowed
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.setup import Offload, TrainSetup
from fsdp_bench.spec.units import format_count

FRONTIER_SCHEMA_VERSION = 1

Status = Literal["found", "unknown", "not searched", "skipped"]


_UNITS = {"num_hidden_layers": "layer", "micro_batch_size": "sequence", "sequence_length": "token"}


class QuantityRange(msgspec.Struct, frozen=True, kw_only=True):
    """The searched quantity and its range. Raises SpecError for a name that is not a quantity."""

    name: str
    """num_parameters (the size ladder), num_hidden_layers, micro_batch_size or sequence_length."""
    smallest: int
    largest: int
    num_steps: int

    def print(self, value: int) -> str:
        """Return a value with its unit; ``none`` for 0."""
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
    """The value of the quantity at which memory ran out."""
    place: str
    """``gpu``, ``budget`` (a memory limit on a CPU) or ``host``."""
    phase: str
    """The phase in which memory ran out, if measured. If predicted, or if the trial ended with retries: the phase of
    the peak, which may be later. ``unknown`` if it is not known."""
    ran_out: bool
    """Whether memory ran out; otherwise the trial ended with allocation retries."""
    trial_id: str | None = None
    """The ID of the trial. None if this is predicted."""

    def __post_init__(self) -> None:
        if self.place == "card":  # its name in older files
            msgspec.structs.force_setattr(self, "place", "gpu")


class LargestValues(msgspec.Struct, frozen=True, kw_only=True):
    """The largest values of the quantity that fit and that run. 0 if the smallest does not."""

    fits: int
    """The largest value that runs without allocation retries."""
    runs: int
    """The largest value that runs without running out of memory. On a CPU the same as ``fits``."""
    num_parameters: int
    """Number of parameters of the model with the value ``fits``; 0 if none fits."""
    limited_by: FirstFailure | None
    """The memory that the next value exceeds. None if the range ends before memory runs out."""


class FrontierCell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell: what is searched, the predicted answer and the measured answer."""

    label: str
    setup: TrainSetup
    """The setup. The value of the searched field has no meaning in it."""
    quantity: QuantityRange = msgspec.field(name="dial")
    """The searched quantity and its range. Its key in the file is ``dial``."""
    family: Family
    vocab_size: int
    model: ModelShape | None
    """The model. None if its size is searched."""
    status: Status
    """``unknown``: a trial crashed or timed out. ``not searched``: the search has not ended yet."""
    reason: str | None
    """The reason why the status is not ``found``, and which values are skipped because a smaller one did not run."""
    predicted: LargestValues | None
    """The predicted answer. None if the GPU is not in the catalogue, or the setup cannot be predicted."""
    measured: LargestValues | None
    """The measured answer. None unless the status is ``found``."""
    steps_apart: int | None
    """Number of candidates from the predicted to the measured ``fits``; negative if less fits than predicted."""
    trials: tuple[str, ...]
    """IDs of the cell's trials that ended ``ok`` or out of memory, by increasing value."""
    most_trials: int
    """Number of trials that a bisection would need to find ``fits``."""


class FrontierRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One frontier sweep: ``frontier.json``."""

    schema_version: int
    sweep: str
    source: Literal["measured", "rehearsed"]
    device: Device
    machine: str
    """One line that describes the machine."""
    run: RunPlan
    """The plan of every trial. Its memory_limit_bytes replaced the GPU's memory."""
    gpu_is_limited: bool = msgspec.field(name="card_is_limited")
    """Whether --gpu-memory limited the GPU."""
    cells: tuple[FrontierCell, ...]


def cell_label(setup: TrainSetup, name: str, quantity_name: str) -> str:
    """Return a cell in one line: its model or family, and the setup without the searched field."""
    parts = [name, f"world {setup.world_size}", setup.strategy.value, setup.api.value, str(setup.precision)]
    parts.append(f"checkpointing {setup.checkpointing.value}")
    parts += [one.phrase(getattr(setup, one.name)) for one in setup.changed()]
    if setup.offload is not Offload.NONE:
        parts.append("offload" if setup.offload is Offload.PARAMS else "offload optimizer")
    batch = "" if quantity_name == "micro_batch_size" else f" {setup.micro_batch_size}"
    tokens = "" if quantity_name == "sequence_length" else f" x {setup.sequence_length}"
    return " ".join([*parts, f"batch{batch}{tokens}"])


def read_frontier(data: bytes, name: str) -> FrontierRecord:
    """Decode frontier.json, as ``from_versioned``."""
    return from_versioned(data, FrontierRecord, name, FRONTIER_SCHEMA_VERSION)
