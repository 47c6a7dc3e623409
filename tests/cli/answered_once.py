"""Commands whose question is answered once and printed several times: at several widths, as text and as JSON."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from fsdp_bench.cli import doctor, max_size, predict
from fsdp_bench.plan import max_size as max_size_answers
from fsdp_bench.plan import remedies
from tests import conftest
from tests.conftest import run_command

ANSWERS: dict[str, ModuleType] = {
    "max_sizes": max_size,
    "answers": predict,
    "remedies": remedies,
    "nothing_fits": max_size_answers,
    "diagnose": doctor,
}
"""Functions that answer questions, and the modules in which the commands look them up."""


@contextmanager
def answered_once() -> Iterator[None]:
    """Let all commands inside print the first one's answers. Their options may differ in printing alone."""
    kept: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in ANSWERS.items():
            patch.setattr(module, name, partial(_keep, kept, name, getattr(module, name)))
        yield


def printed_at(widths: tuple[int, ...], *words: object) -> Iterator[tuple[int, subprocess.CompletedProcess[str]]]:
    """Yield each width of the terminal and the command's result at that width."""
    with answered_once():
        for width in widths:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(conftest.TERMINAL, "COLUMNS", str(width))
                done = run_command(*words)
            yield width, done


def _keep(kept: dict[str, Any], name: str, function: Any, *arguments: Any, **options: Any) -> Any:
    if name not in kept:
        answer = function(*arguments, **options)
        kept[name] = list(answer) if isinstance(answer, Iterator) else answer
    return kept[name]
