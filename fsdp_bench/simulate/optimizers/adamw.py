"""torch.optim.AdamW in its three implementations, and SGD without momentum, which keeps and allocates nothing."""

from __future__ import annotations

from fsdp_bench.simulate.events import Category
from fsdp_bench.simulate.optimizers.shards import STEP_BYTES, Shard, counts, marked
from fsdp_bench.simulate.tape import Storage, Tape
from fsdp_bench.spec.setup import OptimizerKind


def adamw_states(tape: Tape, shards: list[Shard], has_step: bool) -> list[Storage]:
    """Allocate two moments a parameter, and ``state["step"]`` where it is on the device."""
    held = []
    category = Category.OPTIMIZER_STATE
    for shard in marked(tape, tape.phase, shards):
        if has_step and counts(shard):
            held.append(tape.storage(STEP_BYTES, "step", category))
        held += [tape.storage(shard.numel * shard.itemsize, name, category) for name in ("exp_avg", "exp_avg_sq")]
    return held


def adamw_step(tape: Tape, kind: OptimizerKind, shards: list[Shard], steps_on_device: bool) -> None:
    """Allocate what a step needs for a moment."""
    if kind is OptimizerKind.ADAMW_FOREACH:
        _foreach(tape, shards, steps_on_device)
    elif kind is OptimizerKind.ADAMW_FOR_LOOP:
        _for_loop(tape, shards)


def _foreach(tape: Tape, shards: list[Shard], steps_on_device: bool) -> None:
    """_multi_tensor_adam: the square roots of all second moments at once."""
    if steps_on_device:
        tape.storage(STEP_BYTES, "aten::lift_fresh", Category.TEMPORARY)
    held = [
        tape.storage(shard.numel * shard.itemsize, "aten::_foreach_sqrt", Category.TEMPORARY)
        for shard in marked(tape, "optimizer", shards)
    ]
    for _shard in marked(tape, "optimizer", shards[::-1]):
        held.pop()


def _for_loop(tape: Tape, shards: list[Shard]) -> None:
    """_single_tensor_adam: sqrt, then a quotient that lives until the next parameter's is made."""
    denominator = None
    for shard in marked(tape, "optimizer", [shard for shard in shards if counts(shard)]):
        root = tape.storage(shard.numel * shard.itemsize, "aten::sqrt", Category.TEMPORARY)
        denominator = tape.storage(shard.numel * shard.itemsize, "aten::div", Category.TEMPORARY)
        del root
    del denominator
