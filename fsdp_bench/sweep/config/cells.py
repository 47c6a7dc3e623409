"""The cells of a sweep file: [grid] is crossed, [[include]] adds cells, [[exclude]] names cells that are not run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from fsdp_bench.plan.defaults import DEFAULT_PRECISION, DEFAULT_SEQUENCE_LENGTH
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import SpecError, shown
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.setup import FIELDS, TrainSetup
from fsdp_bench.sweep.config.reading import FIELD_ALIASES, check_keys, convert
from fsdp_bench.sweep.config.shapes import MODEL_KEYS, is_percent_of_gpu, shape_of
from fsdp_bench.sweep.config.sweep_file import SweepFile, table, tables
from fsdp_bench.sweep.machine import Machine

_SETUP_KEYS = TrainSetup.__struct_fields__
_GRID_KEYS = (*MODEL_KEYS, *_SETUP_KEYS, *FIELD_ALIASES)

Cell = dict[str, Any]

MOST_CELLS = 100_000
"""The most cells of one table. With trials of five minutes they take almost a year."""


def cells(document: dict[str, Any]) -> Iterator[tuple[str, Cell]]:
    """Yield every cell in the order of the file, each with its place in the file.

    Raises:
        SpecError: naming the place.
    """
    grid = _canonical("[grid] ", table(document, "grid"))
    yield from (("[grid]", cell) for cell in _cross(grid, "[grid]"))
    single = {key: value for key, value in grid.items() if not isinstance(value, list)}
    listed = {key for key, value in grid.items() if isinstance(value, list)}
    for number, extra_table in enumerate(tables(document, "include"), 1):
        place = f"[[include]] {number}"
        extra = _canonical(f"{place} ", extra_table)
        if {"model", "params"} & set(extra):  # either names the model
            listed = listed - {"model", "params"}
        missing = sorted(listed - set(extra))
        if missing:
            raise SpecError(f"{place} does not say {missing[0]!r}, for which [grid] has several values")
        merged = {**single, **extra}
        if "params" in extra:
            merged.pop("model", None)
        yield from ((place, cell) for cell in _cross(merged, place))


def _canonical(place: str, written: dict[str, Any]) -> dict[str, Any]:
    check_keys(place, written, _GRID_KEYS)
    renamed: dict[str, Any] = {}
    for key, value in written.items():
        target = FIELD_ALIASES.get(key, key)
        if target in renamed:
            raise SpecError(f"{place}{shown(key)} and {target!r} are the same thing; keep one")
        renamed[target] = value
    return renamed


def _cross(written: dict[str, Any], place: str) -> Iterator[Cell]:
    for key, value in written.items():
        if value == []:
            raise SpecError(f"{place} {key}: an empty list leaves no cell; give at least one value")
    if not written:
        return
    axes = [value if isinstance(value, list) else [value] for value in written.values()]
    if (count := math.prod(map(len, axes))) > MOST_CELLS:
        raise SpecError(f"{place} crosses to {count} cells; up to {MOST_CELLS} are allowed")
    for values in itertools.product(*axes):
        yield dict(zip(written, values, strict=True))


def resolvable(file: SweepFile) -> tuple[list[tuple[str, Cell]], list[str]]:
    """Return the cells whose sizes are known on this machine, and the missing information of the others as text.

    Raises:
        SpecError: naming the place.
    """
    found = [(place, cell, _needs_gpu(cell, file)) for place, cell in cells(file.document)]
    needs = Counter(need for _, _, need in found if need)
    return [(place, cell) for place, cell, need in found if not need], [f"{n} with {need}" for need, n in needs.items()]


def _needs_gpu(cell: Cell, file: SweepFile) -> str | None:
    """Return which sizes of a cell depend on a GPU that this machine lacks; None if no size does."""
    if not file.lacks_gpu:
        return None
    is_percent = is_percent_of_gpu(cell.get("params")) and not file.gpu_is_limited
    if cell.get("world_size") == "gpus":
        return 'params in "% of GPU" and world_size = "gpus"' if is_percent else 'world_size = "gpus"'
    return 'params in "% of GPU" (--gpu-memory SIZE says how large it is)' if is_percent else None


def with_defaults(cell: Cell, file: SweepFile) -> Cell:
    """Add the default precision and sequence length to a cell that has none."""
    model = file.models.get(str(cell.get("model")))
    positions = (None if model is None else model.max_position_embeddings) or DEFAULT_SEQUENCE_LENGTH
    return {"precision": DEFAULT_PRECISION, "sequence_length": min(DEFAULT_SEQUENCE_LENGTH, positions), **cell}


def setup_of(cell: Cell, machine: Machine) -> TrainSetup:
    """Turn a cell of the file into a TrainSetup.

    Raises:
        SpecError: naming the field.
    """
    fields = {key: value for key, value in cell.items() if key in _SETUP_KEYS}
    if fields.get("world_size") == "gpus":
        fields["world_size"] = max(machine.num_gpus, 1)
    fields |= {key: None for key, value in fields.items() if value == "none" and FIELDS[key].is_optional}
    setup: TrainSetup = convert(fields, TrainSetup, "")
    return _sharded_in_nodes(setup, machine)


def _sharded_in_nodes(setup: TrainSetup, machine: Machine) -> TrainSetup:
    """Make a node the shard group of hybrid strategies on several nodes, where the setup says nothing else.

    On two nodes half of the world is a node, so that the setup, and with it the trial's ID, stays as it is on one.
    """
    each = machine.ranks_per_node
    if not setup.strategy.is_hybrid or setup.shard_size is not None or machine.nodes_of(setup.world_size) == 1:
        return setup
    if each is None or each == setup.shard_group_size or setup.world_size % each:
        return setup
    return msgspec.structs.replace(setup, shard_size=each)


class Exclude(msgspec.Struct, frozen=True):
    """One [[exclude]]: its reason and, by field, the parsed values that it matches."""

    place: str
    reason: str
    matches: dict[str, list[Any]]

    def covers(self, shape: TrainedModel, setup: TrainSetup) -> bool:
        """Return whether this [[exclude]] matches a cell."""
        return all(_field(shape, setup, key) in values for key, values in self.matches.items())


def excludes(file: SweepFile) -> list[Exclude]:
    """Read every [[exclude]].

    Raises:
        SpecError: naming the place.
    """
    found = []
    for number, written in enumerate(tables(file.document, "exclude"), 1):
        place = f"[[exclude]] {number}"
        written = dict(written)
        reason = written.pop("reason", None)
        if not isinstance(reason, str) or not reason.strip():
            raise SpecError(f"{place} needs a reason, which the skipped trials' records carry")
        matches: dict[str, list[Any]] = {}
        for key, value in _canonical(f"{place} ", written).items():
            values = value if isinstance(value, list) else [value]
            matches[key] = [_parsed(place, key, word, file) for word in values if not _needs_gpu({key: word}, file)]
        found.append(Exclude(place, reason, matches))
    return found


def _parsed(place: str, key: str, word: Any, file: SweepFile) -> Any:
    if key == "family":
        return Family(word)
    if key == "vocab_size":
        return word
    if key in ("model", "params"):
        return _size(shape_of({key: word}, file.models, file.machine))
    fields = {key: word, **({"world_size": word, "strategy": "HYBRID_SHARD"} if key == "shard_size" else {})}
    return getattr(convert(fields, TrainSetup, place), key)


def _field(shape: TrainedModel, setup: TrainSetup, key: str) -> Any:
    if key in ("model", "params"):
        return _size(shape)
    return getattr(shape, key, None) if key in ("family", "vocab_size") else getattr(setup, key)


def _size(shape: TrainedModel) -> int | str:
    """Return what ``model`` and ``params`` of an [[exclude]] match: the benchmark's models are named by their size."""
    return shape.name if isinstance(shape, ModelCode) else shape.num_parameters


def why_not(shape: TrainedModel, setup: TrainSetup, file: SweepFile, excluded: list[Exclude]) -> str | None:
    """Return why a cell is not run on this machine; None if it is run."""
    reason = next((exclude.reason for exclude in excluded if exclude.covers(shape, setup)), None)
    if reason is not None:
        return f"excluded: {reason}"
    shares_gpus = file.run.emulate or file.run.backend == "gloo"
    has = file.machine.num_gpus
    if not file.run.emulate and (unplaced := file.machine.why_not_placed(setup.world_size)) is not None:
        return unplaced
    if file.device == "cuda" and not file.lacks_gpu and not shares_gpus and setup.world_size > has:
        return f"world size {setup.world_size} needs as many GPUs, or emulate = true; this machine has {has}"
    compiles = setup.compiles or setup.compiles_optimizer
    if file.device == "cpu" and file.run.memory_limit_bytes is not None and compiles:
        return "a CPU's memory_limit follows operators, which compiled code does not call"
    if isinstance(shape, ModelCode):
        return shape.why_impossible(setup, file.device)
    return why_impossible(shape, setup, file.device)
