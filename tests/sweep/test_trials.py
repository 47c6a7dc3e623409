"""Records of trials that end in different ways. tests/attacks kills and interrupts them at random moments."""

import gzip
import json
import signal
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.spec.setup import Api
from fsdp_bench.sweep.results.load import read_records
from tests.conftest import records_of_sweep, run_command, stdout_of, write_tiny_sweep
from tests.processes import Sweep, stop_ranks, wait_for_ranks, wait_until, wait_until_gone
from tests.sweep.conftest import ALL_MEASUREMENTS, FIVE_TRIALS, resume, trial


@pytest.fixture(params=["fsdp1", "fsdp2"])
def record(swept: Path, request: pytest.FixtureRequest) -> TrialRecord:
    """The record of a trial of two ranks that ran."""
    return trial(swept, api=Api(request.param), world_size=2, micro_batch_size=1)


def test_a_record_holds_raw_samples_of_every_rank_and_says_what_ran(record: TrialRecord) -> None:
    assert record.outcome is Outcome.OK
    assert record.fits
    assert (record.source, record.device) == ("measured", "cpu")
    assert len(record.ranks) == 2
    for rank in record.ranks:
        assert (len(rank.warmup_seconds), len(rank.step_seconds)) == (3, 1)
        assert set(rank.memory.phases) == {"load", "forward", "loss", "backward", "optimizer"}
        assert rank.memory.peak_allocated_bytes == max(rank.memory.phases.values())
        assert rank.memory.peak_reserved_bytes is None  # a CPU has no caching allocator
        assert rank.memory.num_alloc_retries is None
        assert (rank.memory.peak_host_bytes or 0) > 100 * 1024**2  # torch alone is more
        assert rank.effective.strategy == "FULL_SHARD"
        assert rank.effective.parameter_dtypes == ("fp32",)
    slowest = [max(samples) for samples in zip(*(rank.step_seconds for rank in record.ranks), strict=True)]
    assert record.step_seconds == statistics.median(slowest)
    assert record.tokens_per_second_per_gpu == pytest.approx(16 / statistics.median(slowest))
    assert record.mfu is None  # no GPU, no peak, no guess


def test_a_budget_on_a_cpu_is_an_outcome_and_the_next_trial_is_unaffected(swept: Path) -> None:
    large, *others = sorted(read_records(swept), key=lambda record: record.outcome is not Outcome.OOM_HOST)
    assert large.setup.micro_batch_size == 512
    assert not large.fits
    assert "a budget, not a GPU" in (large.reason or "")
    assert "2.0 MiB" in (large.reason or "")
    failure = next(rank.failure for rank in large.ranks if rank.failure)
    assert failure.limit == "budget"
    assert failure.phase in ("forward", "loss", "backward")
    assert "BudgetExceeded" in (large.stderr_tail or "")
    after = [record.outcome for record in others if record.started_at > large.started_at]
    assert Outcome.OK in after


def test_communication_is_measured_on_steps_of_its_own(record: TrialRecord) -> None:
    for rank in record.ranks:
        assert len(rank.step_seconds) == 1
        assert len(rank.communication) == 2
        for reading in rank.communication:
            assert 0 <= reading.exposed_seconds <= reading.total_seconds
            kinds = {collective.kind: collective for collective in reading.collectives}
            # Two blocks and the root: all gathered in forward, the blocks again in backward, all reduced once.
            assert (kinds["all_gather"].calls, kinds["reduce_scatter"].calls) == (5, 3)
    assert (record.communication_seconds or 0) > 0


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_torchrun_gives_the_same_numbers_as_the_fork_server(tmp_path: Path, world_size: int) -> None:
    grid, run = f"world_size = {world_size}\nprecision = 'bf16-mixed'", ALL_MEASUREMENTS if world_size > 1 else ""
    files = (write_tiny_sweep(tmp_path, grid, f"{run}\nlauncher = '{each}'", each) for each in ("fork", "torchrun"))
    record, launched = (records_of_sweep(file)[-1] for file in files)
    assert launched.outcome is Outcome.OK
    assert launched.id == record.id
    assert {rank.environment["launcher"] for rank in launched.ranks} == {"torchrun"}
    assert [rank.losses for rank in launched.ranks] == [rank.losses for rank in record.ranks]
    for one, other in zip(launched.ranks, record.ranks, strict=True):
        assert one.memory.phases["load"] == other.memory.phases["load"]
        # Later phases hold what gloo's threads have not released yet: a moment that a loaded machine stretches.
        assert one.memory.peak_allocated_bytes == pytest.approx(other.memory.peak_allocated_bytes, rel=0.15)


def test_only_runs_what_it_selects_and_the_rest_follows_later(tmp_path: Path) -> None:
    grid = "world_size = 1\nstrategy = ['FULL_SHARD', 'NO_SHARD']\napi = ['fsdp1', 'fsdp2']"
    file = write_tiny_sweep(tmp_path, grid, "steps_without_communication = 2")
    run_sweep = partial(records_of_sweep, file, "--machine", "m")
    selected = run_sweep("--only", "strategy=zero3", "--only", "api=fsdp2")
    assert [(r.setup.strategy.value, r.setup.api.value) for r in selected] == [("FULL_SHARD", "fsdp2")]
    csv = tmp_path / "results" / "m" / "tiny" / "trials.csv"
    assert len(csv.read_text().splitlines()) == 1 + 1
    whole = run_sweep()
    assert len(whole) == 4
    assert selected[0] in whole
    for record in whole:  # one rank has nothing to be timed without
        assert record.ranks[0].seconds_without_communication == ()
        assert record.exposed_by_difference_seconds is None
    wrappers = [r.ranks[0].effective.wrapper for r in whole if r.setup.is_ddp and r.ranks[0].effective is not None]
    assert wrappers == ["none"]  # one rank needs no DistributedDataParallel
    run_sweep("--only", "api=fsdp1")
    assert len(csv.read_text().splitlines()) == 1 + 4  # the table is of the sweep, not of the selection


def test_a_skipped_cell_has_a_record_with_its_reason_and_runs_once_the_reason_is_gone(copied: Path) -> None:
    cell = {"api": Api.FSDP2, "micro_batch_size": 512}
    skipped, before = trial(copied, **cell), read_records(copied)
    assert (skipped.outcome, skipped.reason) == (Outcome.SKIPPED, "excluded: slow machine")
    write_tiny_sweep(copied, FIVE_TRIALS.partition("[[exclude]]")[0], ALL_MEASUREMENTS)
    assert resume(copied).returncode == 0
    ran = trial(copied, **cell)
    assert ran.outcome is Outcome.OOM_HOST  # as under fsdp1
    assert [record for record in before if record != skipped] == [r for r in read_records(copied) if r != ran]


def test_a_step_is_also_timed_without_communication(record: TrialRecord) -> None:
    for rank in record.ranks:
        assert len(rank.seconds_without_communication) == 2
        assert rank.without_communication_failure is None
        assert len(rank.losses) == 3 + 1  # of the warm-up and the timed step only
    assert record.exposed_by_difference_seconds == record.step_seconds - record.seconds_without_communication


def test_traces_are_kept_where_they_are_asked_for(swept: Path, record: TrialRecord) -> None:
    """A trace decides nothing: the trial has the ID that it has without, and is not run again for it."""
    kept = sorted((swept / "m" / "tiny" / "traces" / record.id).iterdir())
    assert [path.name for path in kept] == [f"rank-{rank}.trace.json.gz" for rank in range(2)]
    for path in kept:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        named = [event["name"] for event in events if event.get("ph") == "X"]
        assert named.count("gloo:all_gather") == 5  # one step's: see above
        assert "aten::mm" in named


def test_trials_that_are_recorded_get_no_trace_later(swept: Path) -> None:
    words = ("sweep", swept / "tiny.toml", "--results", swept, "--machine", "m", "--no-charts", "--trace")
    assert "5 trials are recorded already and get no trace" in run_command(*words).stderr
    assert "recorded" in run_command(*words, "--list").stdout


def test_snapshots_are_kept_beside_the_trials(tmp_path: Path) -> None:
    """A rank's file, by the trial's ID; a file that is neither is left."""
    from fsdp_bench.sweep.results.store import Store

    store = Store(tmp_path / "results")
    store.open()
    scratch = store.make_scratch("abc")
    (scratch / "rank-0.snapshot.pickle").write_bytes(b"allocations")
    (scratch / "rank-0.log").write_text("")
    store.keep_files("abc", scratch)
    store.close()
    assert (store.snapshots / "abc" / "rank-0.snapshot.pickle").read_bytes() == b"allocations"
    assert not store.traces.exists()


def test_a_report_counts_outcomes_and_gives_reasons_and_charts_are_drawn_beside_the_trials(swept: Path) -> None:
    printed = stdout_of("report", swept)
    assert "measured: 4 trials (3 ok, 1 oom_host)" in printed
    assert "skipped 1: excluded: slow machine" in printed
    drawn = {path.name for path in (swept / "m" / "tiny").glob("*.png")}
    assert drawn == {"peak-memory.png", "throughput.png", "communication.png"}


def by_api(records: list[TrialRecord]) -> dict[tuple[str, bool], TrialRecord]:
    return {(record.setup.api.value, record.setup.compile): record for record in records}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_trials_train_as_eager_ones_and_their_peak_on_a_cpu_is_unknown(tmp_path: Path) -> None:
    # In bf16 compiled kernels round once, and eager ones after each operator.
    grid = "world_size = 2\nprecision = 'fp32'\nloss = 'plain'\napi = ['fsdp1', 'fsdp2']\ncompile = [false, true]"
    run = "communication_steps = 1\ntimeout_seconds = 400"
    records = by_api(records_of_sweep(write_tiny_sweep(tmp_path, grid, run)))
    for api in ("fsdp1", "fsdp2"):
        eager, compiled = records[api, False], records[api, True]
        assert compiled.outcome is Outcome.OK
        for one, other in zip(eager.ranks, compiled.ranks, strict=True):
            assert other.losses == pytest.approx(one.losses, rel=1e-5)
            assert other.memory.peak_allocated_bytes is None
            # The first step compiles; a fallback to eager would not take a hundred times the others.
            assert other.warmup_seconds[0] > 10 * other.step_seconds[-1]


def test_a_killed_rank_crashes_its_trial_and_a_stopped_rank_times_out(new_sweep: Callable[..., Sweep]) -> None:
    sweep = new_sweep("world_size = 2\nseed = [0, 1]", "timeout_seconds = 10")
    manager = sweep.start()
    first = stop_ranks(manager, 2)
    first[1].kill()
    first[0].resume()
    wait_until(sweep.records, manager)
    second = stop_ranks(manager, 2)
    second[0].resume()
    assert manager.wait(200) == 1
    wait_until_gone([*first, *second])
    ended = sweep.records()
    crashed, timed_out = (trial(sweep.results, seed=seed) for seed in (0, 1))
    assert crashed.outcome is Outcome.CRASHED
    assert "SIGKILL" in (crashed.reason or "")
    assert timed_out.outcome is Outcome.TIMEOUT
    assert "not done after 10 s" in (timed_out.reason or "")
    assert sweep.run().returncode == 1  # failed trials are not repeated
    assert sweep.records() == ended
    assert sweep.run("--retry", "crashed").returncode == 1
    assert trial(sweep.results, seed=0).outcome is Outcome.OK
    assert trial(sweep.results, seed=1) == timed_out
    (aside,) = sweep.results.glob("*/*/set-aside/*")
    assert read_record(aside.read_bytes(), aside.name) == crashed


def test_an_interrupt_ends_with_130_and_leaves_no_record_of_the_running_trial(new_sweep: Callable[..., Sweep]) -> None:
    sweep = new_sweep("world_size = 2", "steps = 5000")  # longer than the signal takes, however slow the machine
    manager = sweep.start()
    ranks = wait_for_ranks(manager, 2)
    manager.send_signal(signal.SIGINT)
    assert manager.wait(200) == 130
    assert not sweep.records()
    wait_until_gone(ranks)
    assert not list(sweep.results.glob("*/*/.scratch"))
