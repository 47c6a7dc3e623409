"""The one reader of the catalogue's TOML files."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

from fsdp_bench.spec.codec import from_builtins
from fsdp_bench.spec.errors import SpecError, nearest
from fsdp_bench.spec.hardware import Gpu


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of gpus.toml."""
    text = files("fsdp_bench.catalog").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(from_builtins(entry, Gpu) for entry in tomllib.loads(text)["gpu"])


def gpu(name: str) -> Gpu:
    """Return the GPU of that catalogue name, in any case.

    Raises:
        SpecError: naming the nearest one.
    """
    for entry in gpus():
        if entry.name.lower() == name.lower():
            return entry
    raise SpecError(f"gpu: {name!r} is not in the catalogue{nearest(name, [entry.name for entry in gpus()])}")


def gpu_by_product_name(product_name: str) -> Gpu | None:
    """Return the GPU that NVML or torch calls ``product_name``, the whole name; None when none or several are."""
    found = [entry for entry in gpus() if product_name in entry.product_names]
    return found[0] if len(found) == 1 else None
