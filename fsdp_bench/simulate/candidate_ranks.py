"""The ranks that can need the most memory: those of FSDP1 hold different parts of the parameters.

replay/live_memory.py, worst_rank, simulates them and takes the one with the highest peak.

A rank's shard of a flat parameter begins and ends anywhere in the parameters. With ``use_orig_params`` the optimizer
updates the pieces that lie in it, and what it keeps and needs for a moment follows from their number and sizes, and
from how much of the shard is padding. Without it every rank updates a whole shard, and only loading differs. Under
fully_shard rank 0 always has as much as any other rank, as torch.chunk gives it the most rows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from itertools import count

from fsdp_bench.simulate.models.build import build, few_blocks, with_few_tokens
from fsdp_bench.simulate.models.transformer import SimulatedModel, Weight
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU, FP32, Kernels
from fsdp_bench.simulate.optimizers.dispatch import state_sizes, temporary_bytes
from fsdp_bench.simulate.optimizers.shards import Shard
from fsdp_bench.simulate.tape import CUDA_BLOCK_BYTES, Tape
from fsdp_bench.simulate.wrappers.units import FlatLayout, blocks_are_alike, choose_units, flattened
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Api, Offload, ShardingStrategy, TrainSetup


def candidate_ranks(model: Model, setup: TrainSetup, kernels: Kernels) -> list[int]:
    """Return ranks of which one has the highest peak, in ascending order; mostly rank 0 alone."""
    if setup.api is not Api.FSDP1 or setup.effective_strategy is ShardingStrategy.NO_SHARD:
        return [0]
    return _candidate_ranks(model, with_few_tokens(model, setup), kernels)


@lru_cache(maxsize=64)
def _candidate_ranks(model: Model, setup: TrainSetup, kernels: Kernels) -> list[int]:
    built, layouts = _layouts(model, setup)
    if not setup.use_orig_params:
        return sorted({0, *_padded_ranks(layouts, setup.shard_group_size)})
    if setup.offload is Offload.PARAMS and kernels.is_cuda:  # the optimizer's work is on the host
        return [0]
    ranks = _ranks_with_ends(layouts, setup.shard_group_size)
    scores = [_scores(setup, kernels, built, held) for held in _held(built, layouts, ranks)]
    # The lowest rank of equals, for each of the sums.
    return sorted({ranks[values.index(max(values))] for values in zip(*scores, strict=True)})


def _layouts(model: Model, setup: TrainSetup) -> tuple[SimulatedModel, list[tuple[FlatLayout, list[Weight]]]]:
    """Return the model, with few of its blocks where they are alike, and each unit's flat parameter and weights."""
    operators = Operators(Tape(), CPU)
    built = few_blocks(operators, model, setup)
    units = choose_units(built, setup)
    if not blocks_are_alike(built, units, setup):
        built = build(operators, model, setup, model.num_blocks)
        units = choose_units(built, setup)
    found = flattened(built, units, setup)
    return built, [(FlatLayout(weights, setup, unit.precision), weights) for unit, weights in found if weights]


def _padded_ranks(layouts: Iterable[tuple[FlatLayout, list[Weight]]], group_size: int) -> Iterable[int]:
    """Yield the ranks that pad a part of a flat parameter to a shard's size, which takes a copy."""
    for layout, _ in layouts:
        rank = layout.numel // layout.shard_numel
        if rank < group_size and layout.numel % layout.shard_numel:
            yield rank


def _ranks_with_ends(layouts: list[tuple[FlatLayout, list[Weight]]], group_size: int) -> list[int]:
    """Return the ranks that hold an end of a weight, and one for all that hold only the middle of a weight."""
    ends = set()
    for layout, weights in layouts:
        for weight, offset in zip(weights, layout.offsets, strict=True):
            if weight.is_trained:
                ends |= {offset // layout.shard_numel, (offset + weight.numel - 1) // layout.shard_numel}
    in_the_midst = next(rank for rank in count() if rank not in ends)
    return sorted(rank for rank in {*ends, in_the_midst} if rank < group_size)


def _held(
    model: SimulatedModel, layouts: list[tuple[FlatLayout, list[Weight]]], ranks: list[int]
) -> list[list[tuple[Weight, int]]]:
    """Return what each of the ranks holds, in the order of nn.Module.parameters: weights, and elements of them."""
    place = {id(weight): (layout, index) for layout, weights in layouts for index, weight in enumerate(weights)}
    held: list[list[tuple[Weight, int]]] = [[] for _ in ranks]
    for weight in model.all_weights:
        if not weight.is_trained:  # the optimizer has no state of it
            continue
        layout, index = place[id(weight)]
        offset, shard_numel = layout.offsets[index], layout.shard_numel
        first = bisect_left(ranks, offset // shard_numel)
        last = bisect_right(ranks, (offset + weight.numel - 1) // shard_numel)
        for number in range(first, last):
            held[number].append((weight, layout.in_shard(index, weight, ranks[number])))
    return held


def _scores(
    setup: TrainSetup, kernels: Kernels, model: SimulatedModel, held: list[tuple[Weight, int]]
) -> tuple[int, int, int, int]:
    """Return what ranks differ in, in bytes: the optimizer's states, and these with what is added for a moment.

    By the optimizer's step; by clipping, a norm for each piece; and under no_sync by a gradient like its piece.
    """
    store, kind, rounding = setup.precision.store_bytes, setup.optimizer, 1 if kernels.observed else CUDA_BLOCK_BYTES

    def rounded(num_bytes: int) -> int:
        return num_bytes + -num_bytes % rounding

    def of_all_blocks(values: list[int]) -> int:
        return sum(value * model.times(weight.block) for (weight, _), value in zip(held, values, strict=True))

    def kept(numel: int) -> int:
        return sum(rounded(size) for _, size in state_sizes(kernels, kind, Shard(numel, store, -1)))

    kept_of = {numel: kept(numel) for numel in {numel for _, numel in held}}
    states = of_all_blocks([kept_of[numel] for _, numel in held])
    sizes = [rounded(numel * store) for _, numel in held]
    largest = max(sizes, default=0)
    temporary = temporary_bytes(kind, sizes, of_all_blocks(sizes))
    if setup.optimizer_in_backward:  # one piece after another, each by an optimizer of its own
        temporary = largest
    norms = of_all_blocks([rounded(FP32)] * len(held)) if setup.max_grad_norm is not None else 0
    return states, states + temporary, states + norms, states + (0 if setup.sync_every_micro_batch else largest)
