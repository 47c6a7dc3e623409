"""A trial's time limit, which counts only the time in which the sweep's own process runs.

The limit is ``RunPlan.timeout_seconds`` (spec/record.py), which has the default; ``[run] timeout_seconds`` sets it.
runner.py ends a trial that passes its limit, and outcome.py makes that the outcome ``timeout``.
"""

from __future__ import annotations

import time

MOST_SECONDS_BETWEEN_LOOKS = 2.0
"""The runner checks its limit several times a second. A longer time between two checks means that it was stopped."""


class TimeLimit:
    """A time limit that counts the time in which this process runs, not the time in which it is stopped.

    While this process is stopped (Ctrl-Z, a suspended laptop) the ranks may go on. What they have reported meanwhile is
    read before the limit is checked.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._last = time.monotonic()

    def has_run_out(self) -> bool:
        """Return whether no time is left. Call this at every check for ended ranks."""
        now = time.monotonic()
        self._left -= min(now - self._last, MOST_SECONDS_BETWEEN_LOOKS)
        self._last = now
        return self._left <= 0

    def stop_within(self, seconds: float) -> None:
        """Shorten the time that is left to at most ``seconds``."""
        self._left = min(self._left, seconds)
