"""The pictures of a sweep that is still running, so that the first ones need not wait for its last trial."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from fsdp_bench.spec.record import TrialRecord

FIRST_AFTER_SECONDS = 25.0
MOST_TIME = 0.05
"""Of a sweep's time that drawing meanwhile may take; it happens between trials, never beside one."""


class ChartsMeanwhile:
    """Draws the charts of the trials that are done now and then; each picture says how many of how many they are."""

    def __init__(self, folder: Path, machine: str) -> None:
        self._folder = folder
        self._machine = machine
        self._due = time.monotonic() + FIRST_AFTER_SECONDS

    def update(self, records: list[TrialRecord], num_trials: int) -> None:
        """Draw again if it is time to, and more trials are to come; what cannot be written is left for the end."""
        begin = time.monotonic()
        if begin < self._due or len(records) >= num_trials:
            return
        from fsdp_bench.report.charts.measured import draw_all

        with contextlib.suppress(OSError):
            draw_all(records, self._folder, f"{self._machine}, {len(records)} of {num_trials} trials so far")
        now = time.monotonic()
        self._due = now + max(FIRST_AFTER_SECONDS, (now - begin) / MOST_TIME)
