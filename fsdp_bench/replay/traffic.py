"""The collectives that a wrapper issues in a step: bytes that a rank sends and receives, and their duration."""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.events import Kind, Work
from fsdp_bench.simulate.repeat import Log
from fsdp_bench.spec.setup import TrainSetup


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind in one group, in one step of one rank."""

    kind: str
    """all_gather, reduce_scatter, all_reduce."""
    group: str
    """``shard``, ``replicate``, ``world`` or ``post_forward``."""
    group_size: int
    calls: int
    message_bytes: int
    """Whole messages, summed over calls."""
    seconds: float | None
    """One after another; None where nobody documents or measured what joins the ranks."""


def collectives(log: Log) -> list[Work]:
    """Return the collectives of a log's last step, in the order in which they are issued."""
    kinds = (Kind.COLLECTIVE, Kind.START_COLLECTIVE)
    sent = log.last_step_as(lambda events: [event.work for event in events if event.kind in kinds])
    return [one for one in sent if isinstance(one, Work)]


def traffic(sent: Sequence[Work], setup: TrainSetup, rates: Rates | None = None) -> list[Traffic]:
    """Sum collectives up by kind and group; with the hardware's rates also their time."""
    found: dict[tuple[str, str], list[Work]] = {}
    for work in sent:
        found.setdefault((work.name, work.group), []).append(work)
    return [
        Traffic(
            kind=kind,
            group=group,
            group_size=setup.group_sizes[group],
            calls=len(issued),
            message_bytes=sum(work.num_bytes for work in issued),
            seconds=None if rates is None else _seconds(issued, rates),
        )
        for (kind, group), issued in found.items()
    ]


def _seconds(issued: Sequence[Work], rates: Rates) -> float | None:
    known = [seconds for seconds in map(rates.collective, issued) if seconds is not None]
    return sum(known) if len(known) == len(issued) else None
