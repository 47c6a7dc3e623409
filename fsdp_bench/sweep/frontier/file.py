"""Reads [frontier] of a sweep file: in every cell of [grid] and [[include]] the largest value that fits is searched.

[frontier]
of = "params"         what is searched: the model's size, or "num_hidden_layers", "micro_batch_size", "sequence_length"
smallest = "10M"      the smallest and the largest value that are tried
largest = "70B"
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.plan.search.quantity import OF_ONE_MODEL, Quantity, size_ladder
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.frontier import cell_label
from fsdp_bench.spec.hardware import Gpu, Hardware
from fsdp_bench.spec.model import Family, ModelShape
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.record import Device, RunPlan
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.units import parse_count
from fsdp_bench.sweep.config.grid import Exclude, check_positions, excludes, plan_of, setup_of, why_not, with_defaults
from fsdp_bench.sweep.config.models import shape_of
from fsdp_bench.sweep.config.reading import check_keys, naming, one_of, table
from fsdp_bench.sweep.config.sweep_file import Cell, SweepFile
from fsdp_bench.sweep.config.trial import SweepPlan, Trial, trial_of

MEASURABLE_QUANTITIES = ("params", "num_hidden_layers", "micro_batch_size", "sequence_length")
"""Quantities that a sweep can search, by the names that users write."""
_KEYS = ("of", "smallest", "largest")
_OLDER_NAME = "dial"

RESOLUTION = 1.01
"""Each value is at least 1 % larger than the one before: smaller differences are not worth a trial."""


@dataclass(frozen=True)
class Search:
    """One cell: model and setup, of which only the searched quantity varies."""

    label: str
    quantity: Quantity
    model: ModelShape
    """The model; the smallest one, if its size is searched."""
    setup: TrainSetup
    run: RunPlan
    device: Device
    skip_reason: str | None

    def trial(self, index: int) -> Trial:
        """Return the trial of a candidate."""
        candidate = self.quantity[index]
        assert isinstance(candidate.model, ModelShape)
        return trial_of(candidate.model, candidate.setup, self.run, self.device)

    def value_of(self, model: TrainedModel, setup: TrainSetup) -> int:
        """Return the value of the searched quantity in a model and its setup."""
        name = self.quantity.name
        value: int = getattr(setup if name in ("micro_batch_size", "sequence_length") else model, name)
        return value


def searches_of(file: SweepFile) -> SweepPlan[Search]:
    """Make each cell a search; without the file's GPU, only those whose sizes do not depend on it.

    Raises SweepFileError, naming the place in the file; MachineError if all sizes depend on a GPU that is not here.
    """
    with naming(file.path):
        frontier = table(file.document, "frontier")
        if _OLDER_NAME in frontier and "of" not in frontier:
            frontier = {"of" if key == _OLDER_NAME else key: value for key, value in frontier.items()}
        check_keys("[frontier] ", frontier, _KEYS)
        searched = one_of("[frontier] of", frontier.get("of", "params"), MEASURABLE_QUANTITIES)
        if file.device == "cpu" and file.run.memory_limit_bytes is None:
            raise SpecError("[frontier] on a CPU needs [run] memory_limit, the budget of a rank that stands for a GPU")
        excluded = excludes(file)
        for exclude in excluded:
            _refuse_own_key(searched, exclude.place, exclude.matches)

        def resolve(place: str, cell: Cell) -> tuple[str, Search, str | None]:
            _refuse_own_key(searched, place, cell)
            search = _search(searched, with_defaults(cell, file), frontier, file, excluded)
            return search.trial(0).spec.id, search, search.skip_reason

        return plan_of(file, "cell", resolve)


def _refuse_own_key(searched: str, place: str, keys: dict[str, Any]) -> None:
    """Refuse a cell that fixes the searched quantity. If that is the size of the model, no model may be named."""
    for key in ("params", "model") if searched == "params" else (searched,):
        if key in keys:
            raise SpecError(
                f"{place} {key}: [frontier] searches {searched!r}; leave it out here, or search another quantity"
            )


def _search(searched: str, cell: Cell, frontier: dict[str, Any], file: SweepFile, excluded: list[Exclude]) -> Search:
    quantity, setup = _quantity(searched, cell, file)
    quantity = _bounded(searched, quantity, frontier)
    smallest = quantity[0]
    assert isinstance(smallest.model, ModelShape)
    name = smallest.model.kind if searched == "params" else smallest.model.name
    return Search(
        label=cell_label(setup, name, quantity.name),
        quantity=quantity,
        model=smallest.model,
        setup=smallest.setup,
        run=file.run,
        device=file.device,
        skip_reason=why_not(smallest.model, smallest.setup, file, excluded),
    )


def _quantity(searched: str, cell: Cell, file: SweepFile) -> tuple[Quantity, TrainSetup]:
    setup, gpu = setup_of(cell, file.machine), gpu_of(file)
    hardware = Hardware.of_gpu(gpu) if gpu else None
    if searched == "params":
        vocab_size = _own_model({**cell, "params": "10M"}, file).vocab_size  # it checks the cell's keys too
        return size_ladder(Family(cell.get("family", "llama")), setup, hardware, vocab_size), setup
    shape = _own_model(cell, file)
    if searched != "sequence_length":
        check_positions(shape, setup)
    return OF_ONE_MODEL[searched](shape, setup, hardware), setup


def _own_model(cell: Cell, file: SweepFile) -> ModelShape:
    shape = shape_of(cell, file.models, file.machine)
    if isinstance(shape, ModelCode):
        raise SpecError(
            f"model: {shape.name} is given by its code; [frontier] searches with the benchmark's own models, whose"
            " sizes are dimensions. A list of batches or sequence lengths in [grid] finds what fits"
        )
    return shape


def gpu_of(file: SweepFile) -> Gpu | None:
    """Return the machine's GPU from the catalogue, with its memory limit. None if it is not in the catalogue."""
    gpus = file.machine.gpus if file.device == "cuda" else ()
    gpu = gpu_by_product_name(gpus[0].name) if gpus else None
    limit = file.run.gpu_limit_bytes
    if gpu is None or limit is None:
        return gpu
    return msgspec.structs.replace(gpu, usable_memory_bytes=min(limit, gpu.usable_memory_bytes or limit))


def _bounded(searched: str, quantity: Quantity, frontier: dict[str, Any]) -> Quantity:
    """Keep values between smallest and largest, each at least RESOLUTION times the one before."""
    read = partial(_bound, searched, frontier)
    smallest, largest = read("smallest", 1), read("largest", quantity.values[-1])
    if largest > quantity.values[-1] and "largest" in frontier:
        raise SpecError(
            f"[frontier] largest: {shown(frontier['largest'])} is above the largest possible, {quantity.values[-1]}"
        )
    if smallest > largest:
        raise SpecError(f"[frontier] smallest: {shown(frontier['smallest'])} is above largest")
    values: list[int] = []
    for value in quantity.values:
        if smallest <= value <= largest and (not values or value >= RESOLUTION * values[-1]):
            values.append(value)
    last = max((value for value in quantity.values if value <= largest), default=0)
    if values and values[-1] != last:
        values[-1] = last  # the largest is always tried
    if not values:
        raise SpecError(f"[frontier] smallest, largest: {quantity.name} has no value between {smallest} and {largest}")
    return replace(quantity, values=tuple(values))


def _bound(searched: str, frontier: dict[str, Any], key: str, default: int) -> int:
    value = frontier.get(key, default)
    if searched == "params":
        return parse_count(value, f"[frontier] {key}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"[frontier] {key}: {shown(value)} is not allowed; 1 or more")
    return value
