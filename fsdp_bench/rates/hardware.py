"""The rates of hardware from its calibration or its datasheet."""

from __future__ import annotations

from fsdp_bench.rates.calibrated import Calibrated
from fsdp_bench.rates.datasheet import Rates, datasheet
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.setup import TrainSetup


def rates_of(
    setup: TrainSetup, hardware: Hardware | None, kernels: str, profile: Profile | None, is_alone: bool = False
) -> Rates | None:
    """Return the rates, or None if neither calibration nor datasheet exists.

    Args:
        setup: the setup whose groups communicate.
        hardware: the servers or the GPU; None if no GPU is named.
        kernels: ``cuda`` or ``cpu``.
        profile: the calibration of a machine.
        is_alone: whether one rank runs alone on the machine, as an emulated rank does.

    Raises:
        SpecError: if the calibration was made on another kind of device.
    """
    if profile is not None:
        if profile.device != ("cuda" if kernels == "cuda" else "cpu"):
            other = "cpu" if profile.device == "cpu" else "cuda"
            raise SpecError(f"calibration: the calibration was made on {profile.machine}; use --kernels {other}")
        together = hardware.ranks_per_node(setup.world_size) if hardware else setup.world_size
        return Calibrated(profile, setup, 1 if is_alone else together)
    return datasheet(hardware, setup) if hardware and kernels == "cuda" else None
