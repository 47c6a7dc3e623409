"""The optimizer of a setup: what it keeps, what a step allocates for a moment, and how many bytes it moves."""

from __future__ import annotations

from itertools import groupby

from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.operators.optimizer import Shard
from fsdp_bench.simulate.optimizers.adafactor import adafactor_states, adafactor_step
from fsdp_bench.simulate.optimizers.adamw import adamw_states, adamw_step
from fsdp_bench.simulate.tape import Storage, Tape
from fsdp_bench.spec.setup import OptimizerKind


def states(tape: Tape, kind: OptimizerKind, shards: list[Shard], kernels: Kernels) -> list[Storage]:
    """Allocate what an optimizer keeps between steps, as its first step does."""
    steps_on_device = not kernels.is_cuda
    if kind is OptimizerKind.SGD:
        return []
    if kind is OptimizerKind.ADAFACTOR:
        return adafactor_states(tape, shards, steps_on_device)
    return adamw_states(tape, shards, steps_on_device or kind is OptimizerKind.ADAMW_FUSED)


def step(tape: Tape, kind: OptimizerKind, shards: list[Shard], kernels: Kernels) -> None:
    """Allocate and free what one step needs for a moment."""
    if kind is OptimizerKind.ADAFACTOR:
        adafactor_step(tape, shards, kernels)
    else:
        adamw_step(tape, kind, shards, steps_on_device=not kernels.is_cuda)


_PASSES = {
    OptimizerKind.SGD: 3,
    OptimizerKind.ADAMW_FUSED: 7,
    OptimizerKind.ADAMW_FOREACH: 21,
    OptimizerKind.ADAMW_FOR_LOOP: 21,
    OptimizerKind.ADAFACTOR: 20,
}
"""How often an element is read or written: a parameter, its gradient and two moments, once in a fused step.

AdamW otherwise: once or twice in each of eight: mul_, lerp_, mul_, addcmul_, sqrt, div_, add_, addcdiv_
(torch/optim/adamw.py). Adafactor (_adafactor.py), of what has one dimension: norm, mul, lerp_, clone, clamp_, rsqrt_,
mul_, norm, add_.
"""

_ADAFACTOR_OF_A_MATRIX = 17
"""Adafactor of a matrix: norm, the norms of rows and of columns, mm, div_, clamp_, rsqrt_, mul_, norm, add_."""


def _moved_bytes(kind: OptimizerKind, shard: Shard) -> int:
    passes = _ADAFACTOR_OF_A_MATRIX if kind is OptimizerKind.ADAFACTOR and shard.is_matrix else _PASSES[kind]
    return passes * shard.numel * shard.itemsize


def issue(tape: Tape, kind: OptimizerKind, shards: list[Shard], on_host: bool) -> None:
    """Issue a step's work, block by block; where it is in host memory, the host does it."""
    for block, group in groupby(shards, key=lambda shard: shard.block):
        held = list(group)
        tape.mark("optimizer", block)
        dims = (len(held), sum(shard.numel for shard in held))
        num_bytes = sum(_moved_bytes(kind, shard) for shard in held)
        (tape.host_work if on_host else tape.update)(f"optimizer {kind.value}", num_bytes, dims)
    tape.mark("optimizer", -1)
