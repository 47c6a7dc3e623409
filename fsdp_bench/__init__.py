"""fsdp-bench: which FSDP setting, how large a model, how fast.

One call each, with names as text or as objects; sizes are in bytes, times in seconds:

    estimate(model, ...)          memory, fit and time of a setup; needs no torch
    largest_model(...)            the largest model that fits; needs no torch
    plan_training(model, ...)     which servers, how many, which setting, how long, at what price; needs no torch
    plan_command(command, ...)    the same for one's own training script, by rehearsals
    compare(a, b)                 which bytes and seconds differ between two answers or results; needs no torch
    check(file)                   rehearse the commands that a file lists, and compare them with a baseline
    dry_run(model, ...)           PyTorch's own FSDP code as rank 0 of N, on tensors without data
    rehearse(command, each=...)   a real training command with several values, without a GPU, as rows
    largest_value(command, of)    the largest batch, sequence or other value with which such a command fits
    rehearse_command(command)     one rank of such a command, with all that was seen of it
    sweep(file)                   measure every trial of a sweep file on this machine
    load_results(folder)          measured trials as a table
    fsdp(module, ...)             wrap a module, as the sweep does
    gpu(name), server(name), model(name)   the catalogue

Names load on first use, so that ``import fsdp_bench`` needs no torch and takes no time.
"""

from functools import cache
from typing import Any

from fsdp_bench.version import __version__ as __version__


@cache
def _homes() -> dict[str, str]:
    """Return the module that each public name comes from, as __init__.pyi has them for type checkers."""
    import re
    from importlib.resources import files

    text = files(__name__).joinpath("__init__.pyi").read_text()
    return {name: module for module, name in re.findall(r"^from (\S+) import (\w+) as", text, re.MULTILINE)}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'fsdp_bench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return sorted(_homes())
