"""fsdp-bench: which FSDP setting, how large a model, how fast.

The public names load on first use, so that ``import fsdp_bench`` needs no torch:

    from fsdp_bench import ModelShape, TrainSetup, estimate, fsdp, load_results
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ModelShape": "fsdp_bench.spec.model",
    "Family": "fsdp_bench.spec.model",
    "TrainSetup": "fsdp_bench.spec.setup",
    "ShardingStrategy": "fsdp_bench.spec.setup",
    "Precision": "fsdp_bench.spec.setup",
    "TrialRecord": "fsdp_bench.spec.record",
    "dry_run": "fsdp_bench.sweep.dry_run",
    "estimate": "fsdp_bench.predict.estimate",
    "largest_model": "fsdp_bench.predict.search",
    "load_results": "fsdp_bench.sweep.store",
    "fsdp": "fsdp_bench.train.wrap",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fsdp_bench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
