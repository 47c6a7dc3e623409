"""Resolves cells of a sweep file on a machine: their model and setup, why they are not run; makes each one trial."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from fsdp_bench.plan.defaults import DEFAULT_PRECISION, DEFAULT_SEQUENCE_LENGTH
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.spec.model import Family
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.setup import FIELDS, TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import SIZES
from fsdp_bench.sweep.config.models import is_percent_of_gpu, shape_of
from fsdp_bench.sweep.config.reading import convert, naming, tables
from fsdp_bench.sweep.config.sweep_file import NO_GPU, Cell, SweepFile, canonical, cells
from fsdp_bench.sweep.config.trial import SweepPlan, Trial, trial_of
from fsdp_bench.sweep.machine import Machine

T = TypeVar("T")


def trials_of(file: SweepFile) -> SweepPlan[Trial]:
    """Make each cell a trial; without the file's GPU, only those whose sizes do not depend on it.

    Raises SweepFileError, naming the place in the file; MachineError if all sizes depend on a GPU that is not here.
    """
    with naming(file.path):
        excluded = excludes(file)

        def resolve(_place: str, written: Cell) -> tuple[str, Trial, str | None]:
            cell = with_defaults(written, file)
            setup = setup_of(cell, file.machine)
            shape = shape_of(cell, file.models, file.machine)
            check_positions(shape, setup)
            _check_sizes(shape, written)
            trial = trial_of(shape, setup, file.run, file.device, why_not(shape, setup, file, excluded))
            return trial.spec.id, trial, trial.skip_reason

        return plan_of(file, "trial", resolve)


def check_positions(shape: TrainedModel, setup: TrainSetup) -> None:
    """Refuse a sequence that is longer than the positions that a model learns."""
    positions = shape.learned_positions
    if positions is not None and setup.sequence_length > positions:
        raise SpecError(
            f"sequence_length: {setup.sequence_length} is longer than {shape.name}'s learned positions,"
            f" max_position_embeddings {positions}"
        )


def _check_sizes(shape: TrainedModel, cell: Cell) -> None:
    """Refuse a size of the batch that a user's function does not take."""
    if not isinstance(shape, ModelCode) or shape.function is None:
        return
    for size in SIZES:
        if size in cell and size not in shape.arguments:
            raise SpecError(
                f"{size}: {shape.function}() makes its own batch; give it a parameter {size}, or leave {size} out"
            )


def plan_of(file: SweepFile, what: str, resolve: Callable[[str, Cell], tuple[str, T, str | None]]) -> SweepPlan[T]:
    """Resolve each cell whose sizes are known on this machine to an ID, what it becomes, and why it is skipped.

    ``resolve`` takes a cell's place and the cell; of several with one ID the first counts. Raises SpecError, naming the
    place, also if all are skipped; MachineError if all sizes depend on a GPU that this machine lacks.
    """
    places = [(place, cell, _needs_gpu(cell, file)) for place, cell in cells(file.document)]
    needs = Counter(need for _, _, need in places if need)
    needing_gpu = tuple(f"{count} with {need}" for need, count in needs.items())
    if needing_gpu and needs.total() == len(places):
        raise MachineError(f"{file.path}: every {what} needs the GPU: {'; '.join(needing_gpu)}; and {NO_GPU}")
    found = dict[str, tuple[T, str | None]]()
    for place, cell in ((place, cell) for place, cell, need in places if not need):
        try:
            key, one, skip_reason = resolve(place, cell)
        except SpecError as error:
            raise SpecError(str(error) if str(error).startswith("[") else f"{place} {error}") from None
        found.setdefault(key, (one, skip_reason))
    reasons = {reason for _, reason in found.values()}
    if None not in reasons:
        raise SpecError(f"no {what} can run here: {min(filter(None, reasons), default='the grid is empty')}")
    return SweepPlan(file, tuple(one for one, _ in found.values()), needing_gpu)


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
    """Turn a cell of the file into a TrainSetup."""
    fields = {key: value for key, value in cell.items() if key in TrainSetup.__struct_fields__}
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
    """Read every [[exclude]]."""
    found = []
    for number, written in enumerate(tables(file.document, "exclude"), 1):
        place = f"[[exclude]] {number}"
        written = dict(written)
        reason = written.pop("reason", None)
        if not isinstance(reason, str) or not reason.strip():
            raise SpecError(f"{place} needs a reason, which the skipped trials' records carry")
        matches: dict[str, list[Any]] = {}
        for key, value in canonical(f"{place} ", written).items():
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
