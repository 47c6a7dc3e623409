"""Compares a trial's model FLOP/s with the FLOP/s of the machine's fastest matrix product, an upper bound."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fsdp_bench.spec.calibration_profile import Profile
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.trial import label_of
from fsdp_bench.validate.step_time import calibration_mismatch


class MatrixRate(msgspec.Struct, frozen=True, kw_only=True):
    """For one compute dtype: the fastest measured matrix product, and the trial with the most model FLOP/s."""

    dtype: str
    matmul_flops_per_second: float
    """FLOP/s of the fastest matrix product in the calibration, with the number of ranks nearest to the trial's."""
    model_flops_per_second: float
    trial: str
    mfu: float | None
    """MFU of that trial: model FLOP/s over the dense peak of the datasheet."""

    @property
    def fraction(self) -> float:
        """The trial's model FLOP/s over the FLOP/s of the matrix product."""
        return self.model_flops_per_second / self.matmul_flops_per_second


def matrix_rates(records: Sequence[TrialRecord], profile: Profile) -> list[MatrixRate]:
    """Return a rate for each compute dtype that is in trials and calibration, separately for emulated trials.

    Raises:
        SpecError: if the calibration applies to none of the trials.
    """
    reasons = {record.id: calibration_mismatch(profile, record) for record in records}
    measured = [record for record in records if record.model_flops_per_second]
    trained = [record for record in measured if reasons[record.id] is None]
    if measured and not trained:
        raise SpecError(f"--calibration: of another machine than the trials: {reasons[measured[0].id]}")
    groups = dict.fromkeys((record.setup.precision.compute, record.device) for record in trained)
    found = [
        _rate([one for one in trained if (one.setup.precision.compute, one.device) == group], profile)
        for group in groups
    ]
    return [rate for rate in found if rate is not None]


def _rate(trained: Sequence[TrialRecord], profile: Profile) -> MatrixRate | None:
    best = max(trained, key=lambda record: record.model_flops_per_second or 0.0)
    dtype = best.setup.precision.compute
    products = [one for one in profile.for_ranks(len(best.ranks)).matmul if one.dtype == dtype]
    if not products or not best.model_flops_per_second:
        return None
    return MatrixRate(
        dtype=dtype,
        matmul_flops_per_second=max(2 * one.m * one.n * one.k / one.seconds for one in products),
        model_flops_per_second=best.model_flops_per_second,
        trial=f"{best.id} {label_of(best.model, best.setup, alone=best.alone)}",
        mfu=best.mfu,
    )
