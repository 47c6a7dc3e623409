"""Records of trials that end in different ways."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.spec.setup import Api
from fsdp_bench.sweep.machine import GpuDevice, probe_machine
from fsdp_bench.sweep.results.load import read_records
from fsdp_bench.sweep.run import runner
from tests.conftest import records_of_sweep, refused, run_command, write_tiny_sweep
from tests.sweep.config.test_grid import machine
from tests.sweep.conftest import ALL_MEASUREMENTS, FIVE_TRIALS, resume, trial

RunSweep = Callable[..., list[TrialRecord]]


@pytest.fixture
def run_sweep(write_sweep: Callable[..., Path]) -> RunSweep:
    """Return a function that runs a sweep of the tiny model and returns its records in order."""

    def run(grid: str, run: str = "", *words: str) -> list[TrialRecord]:
        return records_of_sweep(write_sweep(grid, run), "--machine", "m", *words)

    return run


def only_record(folder: Path, grid: str, run: str) -> TrialRecord:
    """Run a sweep of one trial in a folder; return its record."""
    folder.mkdir()
    (record,) = records_of_sweep(write_tiny_sweep(folder, grid, run))
    return record


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
    record, launched = (
        only_record(tmp_path / launcher, grid, f"{run}\nlauncher = '{launcher}'") for launcher in ("fork", "torchrun")
    )
    assert launched.outcome is Outcome.OK
    assert launched.id == record.id
    assert {rank.environment["launcher"] for rank in launched.ranks} == {"torchrun"}
    assert [rank.losses for rank in launched.ranks] == [rank.losses for rank in record.ranks]
    for one, other in zip(launched.ranks, record.ranks, strict=True):
        assert one.memory.phases["load"] == other.memory.phases["load"]
        # Later phases hold what gloo's threads have not released yet: a moment that a loaded machine stretches.
        assert one.memory.peak_allocated_bytes == pytest.approx(other.memory.peak_allocated_bytes, rel=0.15)


def test_only_runs_what_it_selects_and_the_rest_follows_later(run_sweep: RunSweep, tmp_path: Path) -> None:
    grid = "world_size = 1\nstrategy = ['FULL_SHARD', 'NO_SHARD']\napi = ['fsdp1', 'fsdp2']"
    run = "steps_without_communication = 2"
    selected = run_sweep(grid, run, "--only", "strategy=zero3", "--only", "api=fsdp2")
    assert [(r.setup.strategy.value, r.setup.api.value) for r in selected] == [("FULL_SHARD", "fsdp2")]
    csv = tmp_path / "results" / "m" / "tiny" / "trials.csv"
    assert len(csv.read_text().splitlines()) == 1 + 1
    whole = run_sweep(grid, run)
    assert len(whole) == 4
    assert selected[0] in whole
    for record in whole:  # one rank has nothing to be timed without
        assert record.ranks[0].seconds_without_communication == ()
        assert record.exposed_by_difference_seconds is None
    wrappers = [r.ranks[0].effective.wrapper for r in whole if r.setup.is_ddp and r.ranks[0].effective is not None]
    assert wrappers == ["none"]  # one rank needs no DistributedDataParallel
    run_sweep(grid, run, "--only", "api=fsdp1")
    assert len(csv.read_text().splitlines()) == 1 + 4  # the table is of the sweep, not of the selection


def test_list_shows_trials_and_their_order_and_writes_nothing(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    file = write_sweep("world_size = 2\nstrategy = ['NO_SHARD', 'HYBRID_SHARD', 'FULL_SHARD']")
    done = run_command("sweep", file, "--results", tmp_path / "r", "--list")
    assert done.returncode == 0
    lines = done.stdout.replace("\n  ", " ").splitlines()
    assert ["NO_SHARD" in lines[0], "HYBRID_SHARD" in lines[1], "FULL_SHARD" in lines[2]] == [True] * 3
    assert "skipped: HYBRID_SHARD needs" in lines[1]
    assert not (tmp_path / "r").exists()


def test_a_skipped_cell_has_a_record_with_its_reason_and_runs_once_the_reason_is_gone(copied: Path) -> None:
    cell = {"api": Api.FSDP2, "micro_batch_size": 512}
    skipped, before = trial(copied, **cell), read_records(copied)
    assert (skipped.outcome, skipped.reason) == (Outcome.SKIPPED, "excluded: slow machine")
    write_tiny_sweep(copied, FIVE_TRIALS.partition("[[exclude]]")[0], ALL_MEASUREMENTS)
    assert resume(copied).returncode == 0
    ran = trial(copied, **cell)
    assert ran.outcome is Outcome.OOM_HOST  # as under fsdp1
    assert [record for record in before if record != skipped] == [r for r in read_records(copied) if r != ran]


def test_a_foreign_process_on_a_gpu_makes_the_measurement_suspect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fsdp_bench.sweep.results.store import Store
    from tests.sweep.conftest import read_sweep

    busy = GpuDevice(index=0, name="NVIDIA L4", memory_bytes=1 << 34, processes=(4711,))
    file = tmp_path / "s.toml"
    file.write_text("[run]\ndevice='cuda'\n[grid]\nparams='10M'")
    spec = read_sweep(file, machine((busy,)))[0].spec
    monkeypatch.setattr(runner, "probe_machine", lambda: machine((busy,)))
    store = Store(tmp_path / "results")
    store.open()

    class NoLauncher:
        def start(self, *_: object) -> object:
            raise runner.LauncherError("no GPU here")

        def close(self) -> None:
            pass

    record = runner.TrialRun(spec, "s", store).run(NoLauncher())  # type: ignore[arg-type]
    store.close()
    assert record.suspect == (
        "another process (4711) was on GPU 0 before the trial",
        "another process (4711) was on GPU 0 after the trial",
    )
    assert record.outcome is Outcome.CRASHED


def test_this_machine_can_be_probed_without_torch() -> None:
    found = probe_machine()
    assert found.num_cores >= 1
    assert found.memory_bytes > 1 << 28
    assert found.name


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


@pytest.mark.parametrize(
    ("run", "option", "said"),
    [
        ("communication_steps = 0", "--trace", "--trace keeps profiled steps, and communication_steps = 0 has none"),
        (
            "device = 'cpu'",
            "--memory-snapshot",
            "--memory-snapshot records the allocator of a GPU, and this sweep runs",
        ),
    ],
)
def test_what_trials_do_not_have_is_not_kept(
    run: str, option: str, said: str, write_sweep: Callable[..., Path], tmp_path: Path
) -> None:
    assert said in refused("sweep", write_sweep("world_size = 2", run), "--results", tmp_path, option)


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


def test_a_report_counts_outcomes_and_gives_the_reason_of_what_was_skipped(swept: Path) -> None:
    printed = run_command("report", swept).stdout
    assert "measured: 4 trials (3 ok, 1 oom_host)" in printed
    assert "skipped 1: excluded: slow machine" in printed


def test_charts_are_drawn_beside_the_trials(swept: Path) -> None:
    drawn = {path.name for path in (swept / "m" / "tiny").glob("*.png")}
    assert drawn == {"peak-memory.png", "throughput.png", "communication.png"}


def by_api(records: list[TrialRecord]) -> dict[tuple[str, bool], TrialRecord]:
    return {(record.setup.api.value, record.setup.compile): record for record in records}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_trials_train_as_eager_ones_and_their_peak_on_a_cpu_is_unknown(run_sweep: RunSweep) -> None:
    # In bf16 compiled kernels round once, and eager ones after each operator.
    grid = "world_size = 2\nprecision = 'fp32'\nloss = 'plain'\napi = ['fsdp1', 'fsdp2']\ncompile = [false, true]"
    records = by_api(run_sweep(grid, "communication_steps = 1\ntimeout_seconds = 400"))
    for api in ("fsdp1", "fsdp2"):
        eager, compiled = records[api, False], records[api, True]
        assert compiled.outcome is Outcome.OK
        for one, other in zip(eager.ranks, compiled.ranks, strict=True):
            assert other.losses == pytest.approx(one.losses, rel=1e-5)
            assert other.memory.peak_allocated_bytes is None
            # The first step compiles; a fallback to eager would not take a hundred times the others.
            assert other.warmup_seconds[0] > 10 * other.step_seconds[-1]


@pytest.mark.slow
def test_a_budget_and_compiled_code_do_not_go_together_on_a_cpu(run_sweep: RunSweep) -> None:
    compiled = by_api(run_sweep("world_size = 1\ncompile = [false, true]", "memory_limit = '1GiB'"))["fsdp1", True]
    assert compiled.outcome is Outcome.SKIPPED
    assert "memory_limit follows operators" in (compiled.reason or "")
