"""The rates of hardware, from its calibration or its datasheet; and rates with defaults for what neither says."""

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
    """Return what is known of the hardware's rates; None where that is nothing.

    ``is_alone``: the rank has the machine for itself, as an emulated one has.

    Raises:
        SpecError: when the calibration is of another kind of device.
    """
    cluster = hardware if isinstance(hardware, Cluster) else None
    gpu = cluster.gpu if cluster else hardware if isinstance(hardware, Gpu) else None
    if profile is not None:
        if profile.device != ("cuda" if kernels == "cuda" else "cpu"):
            other = "cpu" if profile.device == "cpu" else "cuda"
            raise SpecError(f"calibration: it is of {profile.machine}; --kernels {other} goes with it")
        together = cluster.gpus_per_node if cluster else setup.world_size
        return Calibrated(profile, setup, 1 if is_alone else together)
    if gpu is None or kernels != "cuda":
        return None
    return datasheet(cluster, gpu, setup, groups_of(cluster, setup) if cluster else None)


ASSUMED_GPU = "H100-SXM"
ASSUMED_BYTES_PER_SECOND = {"collective": 100e9, "copy": 25e9}
"""Of a collective's message, and of a copy to or from the host, where no link is documented."""


class RatesWithDefaults:
    """Rates with a default for whatever is unknown: that of an H100 whose ranks are joined by 100 GB/s.

    They decide when a deferred free is done, and so reserved memory, only where a stream still uses what was freed.
    Times that are shown to users never come from a default.
    """

    blocks_host = False

    def __init__(self, rates: Rates | None, setup: TrainSetup) -> None:
        self._rates = rates
        self._assumed = datasheet(None, next(gpu for gpu in gpus() if gpu.name == ASSUMED_GPU), setup, None)
        self.source = rates.source if rates else "assumed"
        self.launch_seconds = rates.launch_seconds if rates else LAUNCH_SECONDS

    def run(self, work: Work) -> float | None:
        """Seconds of an operator."""
        known = self._rates.run(work) if self._rates else None
        return self._assumed.run(work) if known is None else known

    def send(self, work: Work) -> float | None:
        """Seconds of a collective."""
        known = self._rates.send(work) if self._rates else None
        return work.num_bytes / ASSUMED_BYTES_PER_SECOND["collective"] if known is None else known

    def copy(self, work: Work) -> float | None:
        """Seconds of a copy to or from the host."""
        known = self._rates.copy(work) if self._rates else None
        return work.num_bytes / ASSUMED_BYTES_PER_SECOND["copy"] if known is None else known

    def host(self, work: Work) -> float | None:
        """Seconds of the host's own work."""
        known = self._rates.host(work) if self._rates else None
        return self._assumed.host(work) if known is None else known
