"""What a trial does beside what the machine's matrix products do; every number by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.report.matrix_rate import matrix_rate_line, matrix_rates
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.profile import MatmulTime, Profile, RankProfile, write_profile
from fsdp_bench.spec.record import TrialRecord
from tests.conftest import run_command
from tests.sweep.test_validation import MODEL, reading, record_of

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
    """A trial in fp32 with steps of so many seconds."""
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
    assert rate.share == pytest.approx(flops / 2e6)
    assert "calibrated on two cores, 2026-11-21" in matrix_rate_line(rate, PROFILE)
    assert matrix_rates([fast], replace(PROFILE, device="cuda")) == []


def test_the_report_prints_it(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "here.toml")
    folder = tmp_path / "results" / "trials"
    folder.mkdir(parents=True)
    record = trained(2.0)
    (folder / f"{record.id}.json").write_bytes(to_json(record))
    words = ("report", tmp_path / "results", "--calibration", tmp_path / "here.toml")
    assert "fp32 matrix products reach 2e-06 TFLOP/s" in run_command(*words).stdout
    assert '"matrix_rates":[{"dtype":"fp32"' in run_command(*words, "--json").stdout.replace(" ", "").replace("\n", "")
