"""Rates of the stand-in for NVIDIA's libraries: work ends only when the host waits for it or for later work."""

from __future__ import annotations

from fsdp_bench.simulate.events import Work


class RatesWithoutTime:
    """All work is late and done in the order of issue: the host takes no time, and each piece of work a second.

    So a deferred free happens only when the host waits for work that was issued later, as on the stand-in.
    """

    source = "rehearsed"
    blocks_host = False
    launch_seconds = 0.0

    def run(self, work: Work) -> float:
        """Return one second for an operator."""
        return 1.0

    def collective(self, work: Work) -> float:
        """Return one second for a collective."""
        return 1.0

    def copy(self, work: Work) -> float:
        """Return one second for a copy to or from the host."""
        return 1.0

    def host(self, work: Work) -> float:
        """Return no time for work that the host itself does: meanwhile, nothing ends on the stand-in."""
        return 0.0
