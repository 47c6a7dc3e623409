"""Where weights lie in FSDP1's flat parameter, and what of them a rank holds."""

from __future__ import annotations

from fsdp_bench.simulate.models.transformer import Weight
from fsdp_bench.simulate.operators.precision import Sizes
from fsdp_bench.spec.setup import Precision, ShardingStrategy, TrainSetup

ALIGNMENT_BYTES = 16
"""_flat_param.py, _get_aligned_numel: with use_orig_params every parameter starts at a multiple of this."""


def flat_layout(weights: list[Weight], setup: TrainSetup, precision: Precision) -> FlatLayout:
    """Return where the weights of one unit lie, which computes in this precision."""
    compute_bytes = Sizes.of(precision).compute
    aligned = ALIGNMENT_BYTES // compute_bytes if setup.use_orig_params else 0
    # Without sharding the process group is the whole world, and the flat parameter is padded to its size.
    is_sharded = setup.effective_strategy is not ShardingStrategy.NO_SHARD
    padded_to = setup.shard_group_size if is_sharded else setup.world_size
    return FlatLayout(weights, setup.shard_group_size, aligned, padded_to)


class FlatLayout:
    """FlatParamHandle._init_flat_param_and_metadata: where each weight lies in the flat parameter."""

    def __init__(self, weights: list[Weight], group_size: int, aligned_numel: int, padded_to: int) -> None:
        self.offsets: list[int] = []
        self.paddings: list[int] = []
        total = 0
        for weight in weights:
            if aligned_numel:
                total = self._pad(total, aligned_numel)
            self.offsets.append(total)
            total += weight.numel
        if aligned_numel:
            total = self._pad(total, padded_to)
        self.numel = total
        self.shard_numel = -(-total // group_size)

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
