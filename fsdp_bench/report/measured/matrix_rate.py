"""One sentence that compares the fastest trial's model FLOP/s with the machine's rate of matrix products."""

from __future__ import annotations

from fsdp_bench.spec.profile import Profile
from fsdp_bench.validate.matrix_rate import MatrixRate


def matrix_rate_line(rate: MatrixRate, profile: Profile) -> str:
    """Return both rates, and the trial's as a fraction of the machine's."""
    mfu = "" if rate.mfu is None else f", MFU {rate.mfu:.1%} of the datasheet's peak"
    return (
        f"{rate.dtype} matrix products reach {rate.matmul_flops_per_second / 1e12:.4g} TFLOP/s"
        f" (calibrated on {profile.machine}, {profile.measured_on}); the fastest trial {rate.trial} has"
        f" {rate.model_flops_per_second / 1e12:.4g} TFLOP/s of model FLOPs: {rate.fraction:.1%} of that{mfu}"
    )
