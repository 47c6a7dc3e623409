"""The optimizers of train/models/optimizer.py: their states, and what a step allocates for a moment."""

from __future__ import annotations

from itertools import groupby

import msgspec

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.tape import Storage, Tape
from fsdp_bench.spec.setup import OptimizerKind


class Shard(msgspec.Struct, frozen=True, gc=False):
    """One tensor that the optimizer updates: a parameter's shard, or a flat parameter's."""

    numel: int
    itemsize: int
    block: int
    """The block that it belongs to; -1 for the root's."""
    may_be_empty: bool = False
    """It is what one rank holds of a parameter, and counts only where that is something."""


STEP_BYTES = 4
"""``state["step"]``, an fp32 scalar: on the host unless the optimizer is fused (torch/optim/adamw.py)."""


def states(tape: Tape, kind: OptimizerKind, shards: list[Shard], steps_on_device: bool) -> list[Storage]:
    """Allocate the states: two moments a parameter for AdamW, nothing for SGD without momentum."""
    if kind is OptimizerKind.SGD:
        return []
    held = []
    category = Category.OPTIMIZER_STATE
    for shard in marked(tape, tape.phase, shards):
        if (steps_on_device or kind is OptimizerKind.ADAMW_FUSED) and counts(shard):
            held.append(tape.storage(STEP_BYTES, "step", category))
        held += [tape.storage(shard.numel * shard.itemsize, name, category) for name in ("exp_avg", "exp_avg_sq")]
    return held


def counts(shard: Shard) -> bool:
    """Whether this rank has it. Where only bytes are allocated that does not matter: there are none."""
    return not shard.may_be_empty or shard.numel > 0


def marked(tape: Tape, phase: str, shards: list[Shard]):  # type: ignore[no-untyped-def]
    """Yield shards, marking where each block's begin."""
    block = -1
    tape.mark(phase)
    for shard in shards:
        if shard.block != block:
            block = shard.block
            tape.mark(phase, block)
        yield shard
    tape.mark(phase)


_PASSES = {
    OptimizerKind.SGD: 3,
    OptimizerKind.ADAMW_FUSED: 7,
    OptimizerKind.ADAMW_FOREACH: 21,
    OptimizerKind.ADAMW_FOR_LOOP: 21,
}
"""How often an element is read or written: a parameter, its gradient and two moments, once in a fused step. Otherwise
once or twice in each of eight: mul_, lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_ (torch/optim/adamw.py).
"""


def issue(tape: Tape, kind: OptimizerKind, shards: list[Shard], on_host: bool) -> None:
    """Issue a step's work, block by block; where it is in host memory, the host does it."""
    for block, group in groupby(shards, key=lambda shard: shard.block):
        held = list(group)
        tape.mark("optimizer", block)
        dims = (len(held), sum(shard.numel for shard in held))
        num_bytes = _PASSES[kind] * sum(shard.numel * shard.itemsize for shard in held)
        (tape.host_work if on_host else tape.update)(f"optimizer {kind.value}", num_bytes, dims)
    tape.mark("optimizer", -1)


def step(tape: Tape, kind: OptimizerKind, shards: list[Shard], steps_on_device: bool) -> None:
    """One optimizer step."""
    if kind is OptimizerKind.ADAMW_FOREACH:
        if steps_on_device:
            tape.storage(STEP_BYTES, "aten::lift_fresh", Category.TEMPORARY)
        held = [
            tape.storage(shard.numel * shard.itemsize, "aten::_foreach_sqrt", Category.TEMPORARY)
            for shard in marked(tape, "optimizer", shards)
        ]
        for _shard in marked(tape, "optimizer", shards[::-1]):
            held.pop()
    elif kind is OptimizerKind.ADAMW_FOR_LOOP:
        _for_loop(tape, shards)


def _for_loop(tape: Tape, shards: list[Shard]) -> None:
    """_single_tensor_adamw: sqrt, then a quotient that lives until the next parameter's is made."""
    denominator = None
    for shard in marked(tape, "optimizer", [shard for shard in shards if counts(shard)]):
        root = tape.storage(shard.numel * shard.itemsize, "aten::sqrt", Category.TEMPORARY)
        denominator = tape.storage(shard.numel * shard.itemsize, "aten::div", Category.TEMPORARY)
        del root
    del denominator
