"""Inductor tunes each kernel once, in the first step, on a buffer of the size of the L2 cache."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu
from fsdp_bench.simulate.compiled.block import tune
from fsdp_bench.simulate.events import Kind
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.simulate.tape import Tape
from tests.simulate.compiled.test_choose import LLAMA, SETUP

MIB = 2**20


def peak_of_tuning(alive: int, peak_before: int, copies: list[int], is_backward: bool) -> int:
    """Return the bytes above what is alive, at the highest."""
    tape = Tape(rounding=512)
    tape.mark("backward")
    held = tape.storage(alive, "held")
    tape.storage(peak_before - alive, "gone")  # nobody holds it: it is freed at once
    begin = len(tape.events)
    tune(Operators(tape, kernels_on(CUDA, gpu("H100-SXM"))), copies, is_backward)
    level = highest = 0
    for event in tape.events[begin:]:
        level += {Kind.ALLOCATE: event.num_bytes, Kind.FREE: -event.num_bytes}.get(event.kind, 0)
        highest = max(highest, level)
    assert level == 0
    assert held is not None
    return highest


def test_forward_copies_what_a_kernel_changes() -> None:
    assert peak_of_tuning(100 * MIB, 100 * MIB, [70 * MIB], is_backward=False) == 120 * MIB


@pytest.mark.parametrize(
    ("peak_before", "copy", "expected"),
    [
        (180 * MIB, 70 * MIB, 120 * MIB),  # fits below the peak
        (100 * MIB, 70 * MIB, 50 * MIB),  # does not, not even below what the buffer made of it
        (100 * MIB, 30 * MIB, 80 * MIB),  # does when the second configuration is tried
    ],
)
def test_backward_copies_what_does_not_raise_the_peak(peak_before: int, copy: int, expected: int) -> None:
    assert peak_of_tuning(100 * MIB, peak_before, [copy], is_backward=True) == expected


def test_kernels_are_tuned_in_the_first_step_alone() -> None:
    log = SimulatedSteps(
        replace(LLAMA, num_hidden_layers=2), replace(SETUP, api="fsdp2"), kernels_on(CUDA, gpu("H100-SXM"))
    ).step()
    buffers = [index for index, event in enumerate(log.events) if event.num_bytes == 50 * MIB]
    assert buffers
    assert max(buffers) < log.steps[-1].start
    assert not [event for event in log.last_step() if event.label == "Inductor's tuning"]
