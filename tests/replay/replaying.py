"""Events that a test writes down, through the allocator: rates without a datasheet, and logs without a simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_bench.replay.caching_allocator.program import program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.simulate.events import Event, Work
from fsdp_bench.simulate.repeat import Log


@dataclass(frozen=True)
class EverythingTakes:
    """Rates by which each piece of work takes as long."""

    seconds: float = 0.0
    launch_seconds: float = 0.0
    blocks_host: bool = False
    source: str = "datasheet"

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        """An operator; likewise for the rest."""
        return self.seconds

    collective = copy = host = run


def log_of(events: Iterable[Event], num_blocks: int = 0, extra_blocks: int = 0) -> Log:
    """Return events as the log of one step."""
    listed = list(events)
    return Log(listed, [range(len(listed))], num_blocks, extra_blocks)


def replay(
    events: Log | Iterable[Event],
    gpu_bytes: int | None = None,
    expandable_segments: bool = False,
    seconds: float = 1.0,
) -> AllocatorReading:
    """Run events, or a log, through a fresh allocator; each piece of work takes as long."""
    found = program(events if isinstance(events, Log) else log_of(events))
    assert found is not None
    rates = EverythingTakes(seconds)
    return Replay(found, rates, gpu_bytes, expandable_segments).until()
