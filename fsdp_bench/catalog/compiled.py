"""Reads compiled.json: the benchmark models' blocks as torch.compile compiled them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from fsdp_bench.spec.recording.compiled import CompiledCatalog


@cache
def compiled_catalog() -> CompiledCatalog:
    """Return all recordings. ``python -m fsdp_bench.train.compiled.main`` writes them."""
    data = files("fsdp_bench.catalog").joinpath("compiled.json").read_bytes()
    return msgspec.json.decode(data, type=CompiledCatalog)
