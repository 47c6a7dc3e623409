"""Interrupts: Ctrl-C, SIGTERM and a terminal that closes end a command in one line, with exit code 130, at any moment.

Imports little: the command begins here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from fsdp_bench.spec.exit_codes import ExitCode

LINE = "fsdp-bench: interrupted; the same command resumes"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

CLEANUP_SECONDS = 10.0
"""For so long after an interrupt others are ignored: it is being answered, and the ranks are being ended."""
RETRY_SECONDS = 0.01

_raised_at: float | None = None


def _handle(handler: Any) -> None:
    """Set the handler of each signal that is not ignored, as nohup and a shell's background jobs have them."""
    for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, handler)


def exit_at_once() -> None:
    """End this process in one line at an interrupt: nothing has begun."""
    _handle(_exit)


def ignore() -> None:
    """Ignore interrupts: the exit code is known.

    An interrupt that was raised inside ``exec`` of a text, as dataclasses do while they are imported, and was handled
    since, would still end the process as one that nobody handled: CPython's run_eval_code_obj remembers it until the
    next text is run (_Py_UnhandledKeyboardInterrupt in Python/pythonrun.c).
    """
    _handle(signal.SIG_IGN)
    exec("")


def _exit(_number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, f"{LINE}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


@contextmanager
def raised_once() -> Iterator[None]:
    """Raise KeyboardInterrupt at an interrupt, and again where Python swallowed it.

    It swallows what is raised in a finalizer (``__del__``) and in callbacks, and calls ``sys.unraisablehook``.
    """
    global _raised_at
    previous, hook = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}, sys.unraisablehook
    _raised_at = None

    def raise_again(unraisable: sys.UnraisableHookArgs) -> None:
        global _raised_at
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)
            return
        _raised_at = None
        signal.signal(signal.SIGALRM, _raise)
        signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)

    _handle(_raise)
    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in previous.items():
            if handler is not None:
                signal.signal(number, handler)


def _raise(_number: int, _frame: FrameType | None) -> None:
    global _raised_at
    now = time.monotonic()
    if _raised_at is None or now - _raised_at > CLEANUP_SECONDS:
        _raised_at = now
        raise KeyboardInterrupt
