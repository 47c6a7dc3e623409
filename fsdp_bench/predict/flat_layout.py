"""Where weights lie in FSDP1's flat parameter, and what of them rank 0 holds."""

from __future__ import annotations

from fsdp_bench.predict.symbolic import sym_max, sym_min
from fsdp_bench.predict.transformer import Weight

ALIGNMENT_BYTES = 16
"""_flat_param.py, _get_aligned_numel: with use_orig_params every parameter starts at a multiple of this."""


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

    def in_first_shard(self, index: int, weight: Weight) -> int:
        """Return how many elements of a weight rank 0 holds."""
        return sym_max(sym_min(self.shard_numel - self.offsets[index], weight.numel), 0)
