"""The time of each piece of work; the rates are asked once for each."""

from __future__ import annotations

from fsdp_bench.rates.datasheet import Rates
from fsdp_bench.simulate.events import Kind, Work


class Durations:
    """Durations of work by the rates of the hardware."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._alone: dict[tuple[Kind, Work], float | None] = {}
        self._beside: dict[tuple[Work, tuple[Work, ...]], float] = {}

    @property
    def unknown(self) -> list[tuple[Kind, Work]]:
        """The work whose duration was asked for and is not known, in the order of asking."""
        return [key for key, seconds in self._alone.items() if seconds is None]

    def seconds(self, kind: Kind, work: Work) -> float | None:
        """Return how long a piece of work takes; None where nobody knows."""
        key = (kind, work)
        if key not in self._alone:
            ask = {Kind.KERNEL: self._rates.run, Kind.COPY: self._rates.copy, Kind.HOST_WORK: self._rates.host}
            self._alone[key] = ask.get(kind, self._rates.collective)(work)
        return self._alone[key]

    def beside(self, work: Work, collectives: tuple[Work, ...]) -> float:
        """Return how long an operator takes while collectives run all the time."""
        key = (work, collectives)
        if key not in self._beside:
            self._beside[key] = self._rates.run(work, collectives) or 0.0
        return self._beside[key]
