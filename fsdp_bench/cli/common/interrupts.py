"""Interrupts end a command with one line and exit code 130. It is imported first, so it imports little."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from fsdp_bench.spec.errors import ExitCode

INTERRUPTED = "interrupted; run the same command again"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

CLEANUP_SECONDS = 10.0
"""Ignore further interrupts while ranks shut down: for these seconds after the first one."""
RETRY_SECONDS = 0.01
"""Seconds after which an interrupt that Python swallowed is raised again."""

TIME_LIMIT = signal.SIGUSR1
"""The signal that a batch script asks Slurm for, some time before the job's time limit."""

_raised_at: float | None = None
_time_is_up = False


def _handle(handler: Any) -> None:
    """Set the handler of each signal, except signals that nohup or a shell's background job made the process ignore."""
    for number in SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            signal.signal(number, handler)


def exit_at_once() -> None:
    """Let an interrupt end this process with one line; used before the command has begun to work."""
    _handle(_exit)


def watch_time_limit() -> None:
    """Let the signal of a job's time limit interrupt the command as Ctrl-C does."""
    signal.signal(TIME_LIMIT, _end_in_time)


def time_is_up() -> bool:
    """Return whether the command was interrupted because the job's time limit is near."""
    return _time_is_up


def _end_in_time(number: int, frame: FrameType | None) -> None:
    global _time_is_up
    _time_is_up = True
    _raise(number, frame)


def ignore() -> None:
    """Ignore interrupts; used when the exit code is known.

    CPython remembers a KeyboardInterrupt raised inside ``exec`` until the next ``exec`` (run_eval_code_obj and
    _Py_UnhandledKeyboardInterrupt in Python/pythonrun.c), and would end the process as if nobody had handled it.
    Importing a dataclass runs ``exec``. So run an empty one to clear it.
    """
    _handle(signal.SIG_IGN)
    if signal.getsignal(TIME_LIMIT) is _end_in_time:
        signal.signal(TIME_LIMIT, signal.SIG_IGN)
    exec("")


def _exit(_number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, f"fsdp-bench: {INTERRUPTED}\n".encode())
    os._exit(ExitCode.INTERRUPTED)


@contextmanager
def raised_once() -> Iterator[None]:
    """Raise KeyboardInterrupt, again if Python swallowed it in ``__del__`` or a callback (sys.unraisablehook)."""
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


def drop(stream: Any) -> None:
    """Redirect a stream to the null device; else its buffer would fail again when the process ends."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class ForgivingStream:
    """A text stream that drops text after errors of some kinds: once one of them came, all that follows."""

    def __init__(self, stream: Any, forgiven: tuple[type[Exception], ...]) -> None:
        self._stream, self._forgiven = stream, forgiven

    def write(self, text: str) -> int:
        """Write the text, or drop it if writing fails."""
        try:
            return int(self._stream.write(text))
        except self._forgiven:
            drop(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop it if writing fails."""
        try:
            self._stream.flush()
        except self._forgiven:
            drop(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def forgiving_streams(*forgiven: type[Exception]) -> Iterator[None]:
    """Drop what is printed after errors of some kinds, also as a decorator. A stream that was closed is /dev/null.

    A command's exit code is its answer, also in ``fsdp-bench predict ... | head -1``: it goes on when ``head`` left.
    """
    before = sys.stdout, sys.stderr
    with ExitStack() as opened:
        streams = [
            ForgivingStream(opened.enter_context(open(os.devnull, "w")) if stream is None else stream, forgiven)
            for stream in before
        ]
        sys.stdout, sys.stderr = streams
        try:
            yield
        finally:
            for stream in streams:
                stream.flush()
            sys.stdout, sys.stderr = before
