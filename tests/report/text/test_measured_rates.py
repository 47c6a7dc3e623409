"""The text about rates that a calibration could not measure."""

from fsdp_bench.report.text.speed import measured_rates
from fsdp_bench.spec.calibration_profile import Profile, RankProfile

LOST = RankProfile(num_ranks=2, threads_per_rank=1, launch_seconds=0.0, hook_seconds={"fsdp1": 1e-4, "fsdp2": 0.0})
FOUND = RankProfile(num_ranks=4, threads_per_rank=1, launch_seconds=1e-6, hook_seconds={"fsdp1": 1e-4})


def test_a_time_of_the_host_that_came_out_as_nothing_is_told() -> None:
    """Host times are small differences of large sums; a zero is not a measurement."""
    assert LOST.lost_in_noise == ("the host's time for an operator", "the host's time for a hook of fsdp2")
    assert FOUND.lost_in_noise == ()


def test_predictions_that_rest_on_it_say_so() -> None:
    about = {"machine": "two cores", "device": "cpu", "device_name": "", "measured_on": "2026-11-21", "versions": {}}
    words = measured_rates(Profile(**about, ranks=(LOST, FOUND)))
    assert "without the host's time for an operator (2 ranks), lost in the noise" in words
    assert "(4 ranks)" not in words
    assert "lost" not in measured_rates(Profile(**about, ranks=(FOUND,)))
