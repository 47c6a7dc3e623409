"""Printing that may fail: commands go on where the reader of their output leaves, and sweeps on a full disk, too."""

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
    """A text stream that drops text after errors of some kinds: once one of them came, all that follows."""

    def __init__(self, stream: Any, forgiven: tuple[type[Exception], ...]) -> None:
        self._stream, self._forgiven = stream, forgiven

    def write(self, text: str) -> int:
        """Write the text, or drop it if writing fails."""
        try:
            return int(self._stream.write(text))
        except self._forgiven:
            self._drop_the_rest()
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop it if writing fails."""
        try:
            self._stream.flush()
        except self._forgiven:
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
def forgiving_streams(*forgiven: type[Exception]) -> Iterator[None]:
    """Drop what is printed after errors of some kinds. What was closed before Python started is the null device.

    A command's exit code is its answer, also in ``fsdp-bench predict ... | head -1``: it goes on when ``head`` left.
    """
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
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


def prints_if_it_can(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it goes on if its output cannot be written."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with forgiving_streams(OSError, ValueError):
            return function(*args, **kwargs)

    return wrapped
