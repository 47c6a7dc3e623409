"""What calibrate says of what it could not tell."""

from fsdp_bench.cli.calibrate import lost_in_noise
from fsdp_bench.spec.profile import RankProfile


def test_a_time_of_the_host_that_came_out_as_nothing_is_told() -> None:
    """The host's times are small differences of large sums; zero is no measurement."""
    lost = RankProfile(num_ranks=2, threads_per_rank=1, launch_seconds=0.0, hook_seconds={"fsdp1": 1e-4, "fsdp2": 0.0})
    assert lost_in_noise(lost) == ["the host's time for an operator", "the host's time for a hook of fsdp2"]
    found = RankProfile(num_ranks=4, threads_per_rank=1, launch_seconds=1e-6, hook_seconds={"fsdp1": 1e-4})
    assert lost_in_noise(found) == []
