"""map_forked(): a function of several items at once, in forked processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_forked(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield ``function`` of each item, in their order, computed on all cores.

    Forked processes have what this process has imported, simulated and compiled; only answers are sent between them. On
    one core, of one item, and where processes cannot be forked, this process computes.
    """
    workers = min(len(items), os.cpu_count() or 1)
    if workers < 2 or "fork" not in get_all_start_methods():
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers, get_context("fork"), _set_input, (function, items)) as pool:
        yield from pool.map(_call_nth, range(len(items)))


_input: tuple[Callable[[Any], Any], Sequence[Any]] | None = None


def _set_input(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _input
    _input = function, items


def _call_nth(index: int) -> Any:
    assert _input is not None
    function, items = _input
    return function(items[index])
