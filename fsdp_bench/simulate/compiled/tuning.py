"""The memory that Inductor allocates while it tries a kernel's configurations, when the kernel first runs."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.simulate.events import Category, Kind
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.tape import Storage, Tape

_CONFIGURATIONS = 2
"""Configurations of a kernel without reductions; further ones would take the same memory again."""


def tune(op: Operators, copies: Sequence[int], saves_memory: bool) -> None:
    """Run a kernel on copies, with a buffer that flushes the L2 cache between two runs, for each configuration.

    InductorBenchmarker.benchmark_gpu: the kernel runs once before it makes the buffer. In backward and in optimizers
    copies are on the device only if they do not raise the peak, which the first configuration's buffer may have raised
    (CachingAutotuner.copy_args_to_cpu_if_needed; ``optimize_mem`` is set where no graph is made).

    Args:
        op: of the simulation.
        copies: bytes of what the kernel changes in place.
        saves_memory: whether it runs where no graph is made.
    """
    tape = op.tape
    tape.synchronize_device()
    for _ in range(_CONFIGURATIONS):
        held = _within(_room(tape), copies) if saves_memory else copies
        _copy(op, held)
        buffer = tape.storage(op.kernels.l2_bytes, "Inductor's tuning", Category.TEMPORARY)
        _copy(op, held)
        del buffer


def _copy(op: Operators, copies: Sequence[int]) -> None:
    made: list[Storage] = []
    for num_bytes in copies:
        made.append(op.tape.storage(num_bytes, "Inductor's tuning", Category.TEMPORARY))


def _room(tape: Tape) -> int:
    """Return by how much live memory is below the peak of this phase; trials reset peaks where a phase begins."""
    level = highest = 0
    for event in tape.events[_begin_of_phase(tape) :]:
        if event.kind is Kind.ALLOCATE:
            level += event.num_bytes
            highest = max(highest, level)
        elif event.kind is Kind.FREE:
            level -= event.num_bytes
    return highest - level


def _begin_of_phase(tape: Tape) -> int:
    begin = 0
    for index in reversed(range(len(tape.events))):
        event = tape.events[index]
        if event.kind is Kind.MARK:
            if event.label != tape.phase:
                break
            begin = index
    return begin


def _within(room: int, copies: Sequence[int]) -> list[int]:
    found = []
    for num_bytes in copies:
        if num_bytes <= room:
            room -= num_bytes
            found.append(num_bytes)
    return found
