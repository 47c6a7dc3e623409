"""A trial's model FLOP/s compared with the machine's matrix products; every expected number is computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.report.measured.tables import matrix_rate_line
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import SpecError
from fsdp_bench.spec.profile import MatmulTime, Profile, RankProfile, write_profile
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.validate.matrix_rate import matrix_rates
from tests.conftest import run_command
from tests.validate.test_memory import MODEL, reading, record_of

PRODUCTS = tuple(
    MatmulTime(layout="nt", dtype=dtype, m=100, n=100, k=50, seconds=seconds)  # 10^6 operations
    for dtype, seconds in (("fp32", 1.0), ("fp32", 0.5), ("bf16", 0.1))
)
PROFILE = Profile(
    machine="two cores",
    device="cpu",
    device_name="a processor",
    measured_on="2026-11-21",
    versions={},
    ranks=(RankProfile(num_ranks=1, threads_per_rank=1, launch_seconds=0, hook_seconds={}, matmul=PRODUCTS),),
)


def trained(seconds: float) -> TrialRecord:
    """Return a trial in fp32 with steps of the given seconds."""
    record = record_of(reading({"forward": 1}))
    return replace(record, ranks=(replace(record.ranks[0], step_seconds=(seconds,)),))


def test_the_fastest_trial_stands_beside_the_fastest_product() -> None:
    """2 m n k over the shorter time is 2e6 operations a second; a dtype that nobody trained in is left out."""
    fast, slow = trained(2.0), trained(4.0)
    tokens = fast.setup.tokens_per_step_per_rank
    flops = tokens * MODEL.model_flops_per_token(fast.setup.sequence_length) / 2.0
    (rate,) = matrix_rates([slow, fast], PROFILE)
    assert (rate.dtype, rate.matmul_flops_per_second) == ("fp32", pytest.approx(2e6))
    assert rate.model_flops_per_second == pytest.approx(flops)
    assert rate.fraction == pytest.approx(flops / 2e6)
    assert "calibrated on two cores, 2026-11-21" in matrix_rate_line(rate, PROFILE)


def test_a_calibration_of_another_machine_is_refused_with_the_reason() -> None:
    """Another kind of device, another card, and one process alone on cores that ranks shared when calibrated."""
    with pytest.raises(SpecError, match="of another machine than the trials: the calibration is of two cores"):
        matrix_rates([trained(2.0)], replace(PROFILE, device="cuda"))
    on_card = replace(trained(2.0), device="cuda", ranks=(replace(trained(2.0).ranks[0], device_name="NVIDIA H100"),))
    with pytest.raises(SpecError, match="the calibration is of a processor, the trial ran on NVIDIA H100"):
        matrix_rates([on_card], replace(PROFILE, device="cuda"))
    assert len(matrix_rates([on_card], replace(PROFILE, device="cuda", device_name="NVIDIA H100"))) == 1
    alone = replace(trained(2.0), device="emulated", emulated_on="cpu")
    with pytest.raises(SpecError, match="the trial ran one process on all cores"):
        matrix_rates([alone], replace(PROFILE, ranks=(replace(PROFILE.ranks[0], num_ranks=2),)))


def test_emulated_trials_stand_apart_and_say_so() -> None:
    """Steps without communication are faster, because no data is sent."""
    alone = replace(trained(1.0), device="emulated", emulated_on="cpu")
    real, emulated = matrix_rates([trained(2.0), alone], PROFILE)
    assert emulated.model_flops_per_second == pytest.approx(2 * real.model_flops_per_second)
    assert ("emulated" in real.trial, "emulated" in emulated.trial) == (False, True)


def test_the_report_prints_it(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "here.toml")
    folder = tmp_path / "results" / "trials"
    folder.mkdir(parents=True)
    record = trained(2.0)
    (folder / f"{record.id}.json").write_bytes(to_json(record))
    words = ("report", tmp_path / "results", "--calibration", tmp_path / "here.toml")
    assert "fp32 matrix products reach 2e-06 TFLOP/s" in run_command(*words).stdout
    document = json.loads(run_command(*words, "--json").stdout)
    assert [rate["dtype"] for rate in document["matrix_rates"]] == ["fp32"]
    assert document["matrix_rates"][0]["share"] == pytest.approx(record.model_flops_per_second / 2e6)
    assert "matrix_rates" not in json.loads(run_command(*words[:2], "--json").stdout)
