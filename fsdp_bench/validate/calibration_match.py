"""Whether a calibration applies to a trial: same kind of device, same GPU, same number of processes."""

from __future__ import annotations

from fsdp_bench.spec.profile import Profile
from fsdp_bench.spec.record import TrialRecord


def calibration_mismatch(profile: Profile, record: TrialRecord) -> str | None:
    """Return why a calibration does not apply to a trial; None if it does.

    GPUs must have the same name. CPU names are not compared, because records contain only the CPU's architecture.
    """
    if profile.device != record.hardware:
        return f"the calibration is of {profile.machine}"
    gpus = {rank.device_name for rank in record.ranks}
    if profile.device == "cuda" and gpus != {profile.device_name}:
        return f"the calibration is of {profile.device_name}, the trial ran on {', '.join(sorted(gpus)) or 'no GPU'}"
    if record.emulated_on == "cpu" and profile.for_ranks(1).num_ranks != 1:
        alone = "the trial ran one process on all cores, and the calibration's ranks shared them"
        return f"{alone}; fsdp-bench calibrate --ranks 1 measures one"
    return None
