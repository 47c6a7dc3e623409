"""The rates of hardware from its calibration or its datasheet."""

from __future__ import annotations

from fsdp_bench.rates.calibrated import Calibrated
from fsdp_bench.rates.collectives import groups_of
from fsdp_bench.rates.datasheet import Rates, datasheet
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.hardware import Cluster, Gpu
from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.setup import TrainSetup


def rates_of(
    setup: TrainSetup, hardware: Cluster | Gpu | None, kernels: str, profile: Profile | None, is_alone: bool = False
) -> Rates | None:
    """Return the rates, or None if neither calibration nor datasheet exists.

    Args:
        setup: the setup whose groups communicate.
        hardware: the servers, or the GPU alone.
        kernels: ``cuda`` or ``cpu``.
        profile: the calibration of a machine.
        is_alone: whether one rank runs alone on the machine, as an emulated rank does.

    Raises:
        SpecError: if the calibration was made on another kind of device.
    """
    cluster = hardware if isinstance(hardware, Cluster) else None
    gpu = cluster.gpu if cluster else hardware if isinstance(hardware, Gpu) else None
    if profile is not None:
        if profile.device != ("cuda" if kernels == "cuda" else "cpu"):
            other = "cpu" if profile.device == "cpu" else "cuda"
            raise SpecError(f"calibration: the calibration was made on {profile.machine}; use --kernels {other}")
        together = cluster.gpus_per_node if cluster else setup.world_size
        return Calibrated(profile, setup, 1 if is_alone else together)
    if gpu is None or kernels != "cuda":
        return None
    return datasheet(cluster, gpu, setup, groups_of(cluster, setup) if cluster else None)
