"""The shards that an optimizer updates, as the wrappers hand them over."""

from collections.abc import Iterable, Iterator

import msgspec

from fsdp_bench.simulate.tape import Tape


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One tensor that the optimizer updates: a parameter's shard, or a flat parameter's."""

    numel: int
    itemsize: int
    block: int
    """The block that it belongs to; -1 for the root's."""
    may_be_empty: bool = False
    """It is what one rank holds of a parameter, and counts only where that is something."""
    shape: tuple[int, ...] = ()
    """The whole parameter's, where the optimizer sees its dimensions; () where it sees a piece of a flat parameter."""

    offset: int = 0
    """Elements before it in the storage of its gradient."""

    @property
    def is_matrix(self) -> bool:
        """Whether it has more than one dimension."""
        return len(self.shape) > 1


STEP_BYTES = 4
"""``state["step"]``, an fp32 scalar: on the host unless the optimizer is fused (torch/optim/adamw.py)."""


def counts(shard: Shard) -> bool:
    """Whether this rank has it. Where only bytes are allocated that does not matter: there are none."""
    return not shard.may_be_empty or shard.numel > 0


def marked(tape: Tape, phase: str, shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield shards, marking where each block's begin; not in backward, whose blocks are marked already."""
    if tape.in_backward:
        yield from shards
        return
    block = -1
    tape.mark(phase)
    for shard in shards:
        if shard.block != block:
            block = shard.block
            tape.mark(phase, block)
        yield shard
    tape.mark(phase)
