"""Printing that may fail: a sweep goes on if its output is closed or its disk is full."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ForgivingStream:
    """A text stream that drops text if the pipe or terminal is closed or the disk is full."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or drop it if writing fails."""
        try:
            return int(self._stream.write(text))
        except (OSError, ValueError):
            self._drop_the_rest()
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop it if writing fails."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._drop_the_rest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop_the_rest(self) -> None:
        """Redirect the stream to the null device; else its buffer would fail again when the process ends."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def _forgiving_streams() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    streams = [None if stream is None else ForgivingStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def prints_if_it_can(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it goes on if its output cannot be written."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with _forgiving_streams():
            return function(*args, **kwargs)

    return wrapped
