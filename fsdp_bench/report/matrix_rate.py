"""What trials do beside what the machine's matrix products do: the part of a card that training can reach at all."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.record import TrialRecord


class MatrixRate(msgspec.Struct, frozen=True, kw_only=True):
    """One compute dtype: the fastest measured matrix product, and the trial with the most model FLOPs a second."""

    dtype: str
    matmul_flops_per_second: float
    """Of all sizes that were calibrated with the nearest number of ranks."""
    model_flops_per_second: float
    trial: str
    mfu: float | None
    """Of that trial, over the datasheet's dense peak."""

    @property
    def share(self) -> float:
        """The trial's model FLOPs over what matrix products reach."""
        return self.model_flops_per_second / self.matmul_flops_per_second


def matrix_rates(records: Sequence[TrialRecord], profile: Profile) -> list[MatrixRate]:
    """Return a rate for each compute dtype that was trained in and calibrated."""
    found = []
    hardware = [record for record in records if record.hardware == profile.device and record.model_flops_per_second]
    for dtype in dict.fromkeys(record.setup.precision.compute for record in hardware):
        trained = [record for record in hardware if record.setup.precision.compute == dtype]
        best = max(trained, key=lambda record: record.model_flops_per_second or 0.0)
        products = [one for one in profile.for_ranks(len(best.ranks)).matmul if one.dtype == dtype]
        if products and best.model_flops_per_second:
            found.append(
                MatrixRate(
                    dtype=dtype,
                    matmul_flops_per_second=max(2 * one.m * one.n * one.k / one.seconds for one in products),
                    model_flops_per_second=best.model_flops_per_second,
                    trial=f"{best.id} {best.model.name} {best.setup.strategy.value} {best.setup.api.value}",
                    mfu=best.mfu,
                )
            )
    return found


def matrix_rate_line(rate: MatrixRate, profile: Profile) -> str:
    """Return both rates and the share in one sentence."""
    mfu = "" if rate.mfu is None else f", MFU {rate.mfu:.1%} of the datasheet's peak"
    return (
        f"{rate.dtype} matrix products reach {rate.matmul_flops_per_second / 1e12:.4g} TFLOP/s"
        f" (calibrated on {profile.machine}, {profile.measured_on}); the fastest trial {rate.trial} has"
        f" {rate.model_flops_per_second / 1e12:.4g} TFLOP/s of model FLOPs: {rate.share:.1%} of that{mfu}"
    )
