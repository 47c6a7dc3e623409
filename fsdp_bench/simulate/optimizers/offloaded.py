"""torchao.optim.CPUOffloadOptimizer (torchao/optim/cpu_offload.py): AdamW on the CPU, beside parameters on the GPU.

Gradients are copied to the host as soon as they are reduced, parameters back after the step. The GPU keeps gradients
until then: ``offload_gradients=True`` fails on fully_shard's DTensors, whose record_stream has no sharding strategy.
Parameters with few elements are left to an optimizer on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import prod

from fsdp_bench.simulate.events import Stream
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.optimizer import Shard
from fsdp_bench.simulate.optimizers.dispatch import issue, step
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.spec.setup import OptimizerKind

_MINIMAL_SIZE = 4096
"""CPUOffloadOptimizer's ``minimal_size``: elements of the whole parameter."""

_STREAM = Stream.OPTIMIZER_OFFLOAD


def is_offloaded(shard: Shard) -> bool:
    """Whether its optimizer is on the CPU."""
    return prod(shard.shape) >= _MINIMAL_SIZE


def on_gpu(shards: Iterable[Shard]) -> list[Shard]:
    """Return what an optimizer on the GPU updates."""
    return [shard for shard in shards if not is_offloaded(shard)]


def copy_gradients(tape: Tape, shards: Iterable[Shard], stream: Stream) -> None:
    """Copy each gradient to the host once a stream has reduced it (``backward_hook``)."""
    for shard in shards:
        if is_offloaded(shard):
            tape.wait_stream(_STREAM, stream)
            tape.copy("to_host", shard.numel * shard.itemsize, _STREAM)


def offloaded_step(op: Operators, kind: OptimizerKind, shards: list[Shard]) -> None:
    """CPUOffloadOptimizer.step: the GPU's optimizer, then parameter by parameter the CPU's and the way back."""
    tape = op.tape
    small = on_gpu(shards)
    if small:
        issue(tape, kind, small, on_host=False)
        step(op, kind, small)
    tape.synchronize(_STREAM)
    large = [shard for shard in shards if is_offloaded(shard)]
    for block, group in groupby(large, key=lambda shard: shard.block):
        held = list(group)
        issue(tape, kind, held, on_host=True)
        tape.mark("optimizer", block)
        tape.copy("to_device", sum(shard.numel * shard.itemsize for shard in held), _STREAM)
    tape.mark("optimizer", -1)
    tape.synchronize(_STREAM)
