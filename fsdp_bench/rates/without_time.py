"""Rates of a GPU that is behind the host: work ends only when the host waits for it or for later work."""

from __future__ import annotations

from fsdp_bench.simulate.events import Work


class RatesWithoutTime:
    """The host takes no time. Every operator, collective and copy takes a second, in the order of issue.

    So nothing has ended before the host waits for it, and a deferred free happens only at such a wait, as in a
    rehearsal, on the stand-in for NVIDIA's libraries.
    """

    source = "rehearsed"
    blocks_host = False
    launch_seconds = 0.0

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float:
        """Return one second for an operator."""
        return 1.0

    def collective(self, work: Work) -> float:
        """Return one second for a collective."""
        return 1.0

    def copy(self, work: Work) -> float:
        """Return one second for a copy to or from the host."""
        return 1.0

    def host(self, work: Work) -> float:
        """Return no time for work that the host itself does, because no other work ends meanwhile."""
        return 0.0
