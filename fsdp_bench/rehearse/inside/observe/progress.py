"""A line on standard error every half minute, so that a long rehearsal shows where it is."""

from __future__ import annotations

import sys
import threading
import time

from .steps import Steps

INTERVAL_SECONDS = 30.0


def show(steps: Steps, interval_seconds: float = INTERVAL_SECONDS) -> None:
    """Print the time and the step until the process ends, from a thread of its own."""
    threading.Thread(target=_print_lines, args=(steps, interval_seconds), daemon=True).start()


def _print_lines(steps: Steps, interval_seconds: float) -> None:
    started = time.monotonic()
    while True:
        time.sleep(interval_seconds)
        passed = round(time.monotonic() - started)
        where = "loading" if steps.phase == "load" else f"{steps.phase} of step {steps.num_steps + 1}"
        print(f"fsdp-bench rehearse: {passed} s, {where}", file=sys.stderr, flush=True)
