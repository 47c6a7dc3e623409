"""A rehearsal that is ended from outside, by a time limit or an interrupt, reports what was seen until then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

SIGNAL = signal.SIGRTMIN + 5
"""Asks for the report. Not SIGTERM or SIGUSR1, which training scripts handle themselves."""


def report_at_signal(report: Callable[[], object]) -> None:
    """Report and end the process when the signal comes. A process that the script forked only ends."""
    own = os.getpid()

    def end(_number: int, _frame: object) -> None:
        try:
            if os.getpid() == own:
                report()
        finally:
            os._exit(0)

    signal.signal(SIGNAL, end)


def report_no_more() -> None:
    """Ignore the signal, once the report is being written."""
    signal.signal(SIGNAL, signal.SIG_IGN)
