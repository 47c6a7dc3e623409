"""FSDP units: the modules that become some (train/wrapping/units.py), and where weights lie in a flat parameter."""

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_bench.simulate.models.build import few_blocks
from fsdp_bench.simulate.models.transformer import Module, ModuleList, SimulatedModel, Weight
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU, Sizes
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Api, Precision, ShardingStrategy, TrainSetup, Wrap


@dataclass(frozen=True, eq=False)
class Unit:
    """One FSDP unit."""

    modules: tuple[Module, ...]
    """One module, or several that fully_shard makes one unit of: ``fully_shard([norm, head])``."""
    precision: Precision
    stays_gathered: bool = False
    """Whether fully_shard is given reshard_after_forward=False for this unit, whatever the strategy."""

    @property
    def all_weights(self) -> list[Weight]:
        """The weights of the modules and of all below them."""
        if len(self.modules) == 1:
            return self.modules[0].all_weights
        return [weight for module in self.modules for weight in module.all_weights]


def choose_units(model: SimulatedModel, setup: TrainSetup) -> list[Unit]:
    """Return the units below the root, children before parents."""
    if setup.wrap is Wrap.NONE:
        return []
    if setup.wrap is Wrap.SIZE:
        return [Unit((module,), setup.precision) for module in _units_by_size(model, setup.min_num_params)]
    if setup.wrap is Wrap.BLOCK_AND_ADAPTERS:
        return [Unit((module,), setup.precision) for module in _blocks_and_adapters(model)]
    last = model.blocks[-1]
    blocks = [Unit((block,), setup.precision, block is last and not setup.reshard_last_block) for block in model.blocks]
    if setup.wrap is Wrap.BLOCK or model.ends is None:
        return blocks
    before, after = model.ends
    if setup.api is Api.FSDP1:  # _recursive_wrap visits modules in the order of their registration
        ends = [Unit(before[:1], setup.precision), Unit(after[-1:], setup.head_precision)]
        places = {id(module): place for place, module in enumerate(model.all_modules())}
        return sorted([*ends, *blocks], key=lambda unit: places[id(unit.modules[0])])
    return [Unit(before, setup.precision), *blocks, Unit(after, setup.head_precision, stays_gathered=True)]


def _blocks_and_adapters(model: SimulatedModel) -> list[Module]:
    """peft.utils.other.fsdp_auto_wrap_policy: blocks, and modules without children whose weight is trained."""
    blocks = set(map(id, model.blocks))
    found: list[Module] = []

    def visit(module: Module) -> None:
        for child in module.children:
            visit(child)
        is_trained = any(weight.is_trained and weight.name.endswith("weight") for weight in module.weights)
        if id(module) in blocks or (is_trained and not module.children):
            found.append(module)

    for child in model.children:
        visit(child)
    return found


def num_resharded_units(model: Model, setup: TrainSetup) -> int:
    """Return the number of units that are resharded to a smaller mesh; each creates its own process groups."""
    if setup.reshard_after_forward is None:
        return 0
    built = few_blocks(Operators(Tape(), CPU), model, setup)
    resharded = [unit for unit in choose_units(built, setup) if not unit.stays_gathered]
    return sum(built.times(unit.all_weights[0].block) for unit in resharded)


def blocks_are_alike(model: SimulatedModel, units: list[Unit], setup: TrainSetup) -> bool:
    """Return whether every block's weights are in units of that block alone, so that one block stands for others."""
    if setup.is_ddp:
        return setup.is_bare  # DistributedDataParallel's buckets end anywhere
    of_blocks = {id(module) for block in model.blocks for module in block.all_modules()}
    inside = {id(weight) for unit in units if id(unit.modules[0]) in of_blocks for weight in unit.all_weights}
    return all(id(weight) in inside for block in model.blocks for weight in block.all_weights)


def _units_by_size(model: SimulatedModel, min_num_params: int) -> list[Module]:
    """torch.distributed.fsdp.wrap.size_based_auto_wrap_policy: subtrees that reach the size, never a ModuleList.

    A tied embedding is read outside of its module, so it stays in the root. Modules inside the repeated block count
    once; modules around it count for every block it represents. A weight counts in each module that has it.
    """
    units: list[Module] = []
    kept, reads = set(map(id, model.kept_in_root())), model.reads()
    times = {id(block): model.times(number) for number, block in enumerate(model.blocks)}

    def visit(module: Module, is_in_block: bool) -> int:
        """Return how many parameters of a subtree are in units."""
        is_in_block |= id(module) in times
        weights = {id(w): w for part in module.all_modules() for w in (*part.weights, *reads.get(id(part), ()))}
        numel: int = sum(w.numel * (1 if is_in_block else model.times(w.block)) for w in weights.values())
        if numel < min_num_params:
            return 0
        wrapped = sum(visit(child, is_in_block) * times.get(id(child), 1) for child in module.children)
        if isinstance(module, ModuleList) or id(module) in kept or numel - wrapped < min_num_params:
            return wrapped
        units.append(module)
        return numel

    for child in model.children:
        visit(child, is_in_block=False)
    return units


# -- Where weights lie in FSDP1's flat parameter, and what of them a rank holds ----------------------------------------

ALIGNMENT_BYTES = 16
"""_flat_param.py, _get_aligned_numel: with use_orig_params every parameter starts at a multiple of this."""


def flattened(model: SimulatedModel, units: list[Unit], setup: TrainSetup) -> Iterator[tuple[Unit, list[Weight]]]:
    """Yield the units and the root, each with the weights of its flat parameter: those that no unit before it has."""
    taken: set[int] = set()
    for unit in [*units, Unit((model,), setup.precision)]:
        weights = [weight for weight in unit.all_weights if id(weight) not in taken]
        taken.update(map(id, weights))
        yield unit, weights


class FlatLayout:
    """FlatParamHandle._init_flat_param_and_metadata: where each weight of a unit lies.

    ``precision`` is what the unit computes in.
    """

    def __init__(self, weights: list[Weight], setup: TrainSetup, precision: Precision) -> None:
        aligned_numel = ALIGNMENT_BYTES // Sizes.of(precision).compute if setup.use_orig_params else 0
        # Without sharding the process group is the whole world, and the flat parameter is padded to its size.
        is_sharded = setup.effective_strategy is not ShardingStrategy.NO_SHARD
        self.offsets: list[int] = []
        self.paddings: list[int] = []
        total = 0
        for weight in weights:
            if aligned_numel:
                total = self._pad(total, aligned_numel)
            self.offsets.append(total)
            total += weight.numel
        if aligned_numel:
            total = self._pad(total, setup.shard_group_size if is_sharded else setup.world_size)
        self.numel = total
        self.shard_numel = -(-total // setup.shard_group_size)

    def _pad(self, total: int, multiple: int) -> int:
        padding = -total % multiple
        if padding:
            self.paddings.append(padding)
        return total + padding

    def in_shard(self, index: int, weight: Weight, rank: int) -> int:
        """Return how many elements of a weight a rank of the group holds (FlatParamHandle._get_shard_metadata)."""
        begin, offset = rank * self.shard_numel, self.offsets[index]
        end = min(begin + self.shard_numel, offset + weight.numel)
        return max(end - max(begin, offset), 0)

    def unpadded_shard_numel(self, rank: int) -> int:
        """Return how many elements of the flat parameter a rank holds; the last ranks' shards may be padded."""
        return max(min(self.numel - rank * self.shard_numel, self.shard_numel), 0)
