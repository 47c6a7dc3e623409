"""The model, the setup and the hardware that options mean."""

from __future__ import annotations

from typing import Any

from fsdp_bench.cli.common.options import SetupOptions
from fsdp_bench.cli.common.setups import with_models
from fsdp_bench.spec.setup import TrainSetup


def read_setup(options: SetupOptions) -> tuple[Any, TrainSetup, Any]:
    """Read options with one value each."""
    ((reading, model),) = with_models(options)
    return model, reading.setup, reading.hardware
