"""The rates of hardware from its calibration or its datasheet, and rates with defaults for what is unknown."""

from __future__ import annotations

from fsdp_bench.catalog.loader import gpus
from fsdp_bench.rates.calibrated import Calibrated
from fsdp_bench.rates.collectives import groups_of
from fsdp_bench.rates.datasheet import LAUNCH_SECONDS, Rates, datasheet
from fsdp_bench.simulate.events import Work
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


ASSUMED_GPU = "H100-SXM"
ASSUMED_BYTES_PER_SECOND = {"collective": 100e9, "copy": 25e9}
"""Assumed rates of a collective's message, and of a copy to or from the host, if the link is not documented."""


class RatesWithDefaults:
    """Rates with a default for what is unknown: an H100, and an interconnect of 100 GB/s.

    Defaults only affect when blocks used by another stream are freed, hence reserved memory. Printed times never use a
    default.
    """

    blocks_host = False

    def __init__(self, rates: Rates | None, setup: TrainSetup) -> None:
        self._rates = rates
        self._assumed = datasheet(None, next(gpu for gpu in gpus() if gpu.name == ASSUMED_GPU), setup, None)
        self.source = rates.source if rates else "assumed"
        self.launch_seconds = rates.launch_seconds if rates else LAUNCH_SECONDS

    def run(self, work: Work, beside: tuple[Work, ...] = ()) -> float | None:
        """Return the seconds of an operator."""
        known = self._rates.run(work, beside) if self._rates else None
        return self._assumed.run(work, beside) if known is None else known

    def collective(self, work: Work) -> float | None:
        """Return the seconds of a collective."""
        known = self._rates.collective(work) if self._rates else None
        return work.num_bytes / ASSUMED_BYTES_PER_SECOND["collective"] if known is None else known

    def copy(self, work: Work) -> float | None:
        """Return the seconds of a copy to or from the host."""
        known = self._rates.copy(work) if self._rates else None
        return work.num_bytes / ASSUMED_BYTES_PER_SECOND["copy"] if known is None else known

    def host(self, work: Work) -> float | None:
        """Return the seconds of work that the host itself does."""
        known = self._rates.host(work) if self._rates else None
        return self._assumed.host(work) if known is None else known
