"""Events that a test writes down, through the allocator: logs without a simulation."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_bench.replay.caching_allocator.program import program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.simulate.events import Event
from fsdp_bench.simulate.repeat import Log


def log_of(events: Iterable[Event], num_blocks: int = 0, extra_blocks: int = 0) -> Log:
    """Return events as the log of one step."""
    listed = list(events)
    return Log(listed, [range(len(listed))], num_blocks, extra_blocks)


def replay(
    events: Log | Iterable[Event], gpu_bytes: int | None = None, expandable_segments: bool = False
) -> AllocatorReading:
    """Run events, or a log, through a fresh allocator."""
    found = program(events if isinstance(events, Log) else log_of(events))
    assert found is not None
    return Replay(found, gpu_bytes, expandable_segments).until()
