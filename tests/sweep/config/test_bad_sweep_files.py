"""Sweep files that cannot be meant: every number, name and list that is out of bounds is one line."""

import csv
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsdp_bench.spec.errors import SpecError, SweepFileError
from fsdp_bench.spec.record import TrialRecord
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.results.load import load_results, read_records
from fsdp_bench.sweep.results.store import Store
from tests.conftest import TINY_MODEL, refused, stdout_of
from tests.sweep.config.test_grid import machine

RESULTS = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "max-size-quick"


@pytest.fixture(scope="module")
def record() -> TrialRecord:
    return read_records(RESULTS)[0]


RUNS = [
    ("timeout_seconds = nan", "run.timeout_seconds: nan is not allowed; a finite number"),
    ("timeout_seconds = inf", "run.timeout_seconds: inf is not allowed; a finite number"),
    ("timeout_seconds = -1.0", "timeout_seconds: -1.0 is not allowed; a positive number"),
    ("timeout_seconds = 0", "timeout_seconds: 0.0 is not allowed; a positive number"),
    ("timeout_seconds = 1e300", "timeout_seconds: 1e+300 is not allowed; up to 1000000"),
    ("steps = 9000000000", "steps: 9000000000 is not allowed; up to 1000000"),
    ("warmup_steps = 9000000000", "up to 1000000"),
    ("communication_steps = 9000000000", "up to 1000000"),
    ("steps_without_communication = 9000000000", "up to 1000000"),
    ("threads_per_rank = 100000", "up to 4096"),
    ("threads_per_rank = 0", "threads_per_rank: 0 is not allowed"),
    ("steps = 0", "steps: 0 is not allowed"),
    *((f"{name} = -1", f"{name}: -1 is not") for name in ("communication_steps", "steps_without_communication")),
    ("memory_limit = nan", "a finite number"),
    ("memory_limit = -5", "memory_limit: -5 is not a positive size"),
    (f"memory_limit = '{'9' * 400}GiB'", "is too large"),
    ("name = 'trials'", "[run] name: 'trials' is not allowed"),
    ("name = 'Trials'", "[run] name: 'Trials' is not allowed"),
]
GRIDS = [
    ("learning_rate = nan", "grid.learning_rate: nan is not allowed; a finite number"),
    ("learning_rate = [0.1, inf]", "grid.learning_rate: inf is not allowed; a finite number"),
    ("learning_rate = -0.1", "learning_rate: -0.1 is not allowed"),
    ("max_grad_norm = inf", "grid.max_grad_norm: inf is not allowed; a finite number"),
    ("max_grad_norm = -1.0", "max_grad_norm: -1.0 is not allowed"),
    (f"seed = {list(range(400))}\nmicro_batch_size = {list(range(1, 400))}", "crosses to 159600 cells; up to"),
    ("strategy = [{a = 1}]", "strategy: {'a': 1} is not allowed"),
    ("strategy = [[]]", "strategy: [] is not allowed"),
]
FILES: list[tuple[str, list[str]]] = [
    ("[grid]\nmodel='tiny'\nstrategy='FULL_SHRD'", ["[grid]", "strategy", "FULL_SHRD", "did you mean 'FULL_SHARD'"]),
    ("[grid]\nmodel='tiny'\nstratgy='zero3'", ["[grid]", "'stratgy'", "did you mean 'strategy'"]),
    ("[run]\nstep=3\n[grid]\nmodel='tiny'", ["[run]", "'step'", "did you mean 'steps'"]),
    ("[gird]\nmodel='tiny'", ["'gird'", "did you mean 'grid'"]),
    ("[grid]\nmodel='tiny'\nprecision='bf17'", ["precision", "'bf17'", "bf16-mixed"]),
    ("[grid]\nmodel='tiny'\nworld_size='two'", ["world_size", "two"]),
    ("[grid]\nmodel='tiny'\nworld_size=0", ["world_size", "0", "1 or more"]),
    ("[grid]\nmodel='tiny'\nworld_size=[]", ["world_size", "empty list"]),
    ("[grid]\nmodel='tin'", ["model", "'tin'", "tiny"]),
    ("[grid]\nparams='7Q'", ["params", "'7Q'", "K, M, B, T"]),
    ("[grid]\nparams='7'", ["params", "10M to 1T"]),
    ("[grid]\nworld_size=2", ["names no model"]),
    ("[grid]\nmodel='tiny'\nbatch=1\nmicro_batch_size=2", ["same thing"]),
    ("[grid]\nmodel='tiny'\nshard_size=2", ["shard_size", "HYBRID_SHARD"]),
    ("[run]\nwarmup_steps=1\n[grid]\nmodel='tiny'", ["warmup_steps", "2 or more"]),
    ("[run]\nmemory_limit='2 parsecs'\n[grid]\nmodel='tiny'", ["memory_limit", "GiB"]),
    ("[run]\ndevice='tpu'\n[grid]\nmodel='tiny'", ["device", "'tpu'", "auto, cpu, cuda"]),
    ("[run]\nname='../x'\n[grid]\nmodel='tiny'", ["name", "'../x'"]),
    ("[grid]\nmodel='tiny'\nmodel='tiny'", ["is not TOML", "line"]),
    ("grid = 3", ["grid", "must be a table"]),
    ("", ["grid is empty"]),
    *((f"[run]\n{run}\n[grid]\nmodel='tiny'", [part]) for run, part in RUNS),
    *((f"[grid]\nmodel='tiny'\n{grid}", [part]) for grid, part in GRIDS),
    *(
        (f"[grid]\nmodel={model}", ["is not defined; [models.*] of this file: tiny"])
        for model in ("[[]]", "[{a=1}]", "7")
    ),
]


@pytest.mark.parametrize(("text", "parts"), FILES)
def test_a_mistake_in_a_sweep_file_is_one_line_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "file.toml"
    path.write_text(text + TINY_MODEL)
    message = refused("sweep", path, "--list")
    assert [part for part in ["file.toml", *parts] if part not in message] == []


OPTIONS = [
    ("", "--nodes 2", "--nodes and --rdzv-endpoint go together"),
    ("", "--rdzv-endpoint a:1", "--nodes and --rdzv-endpoint go together"),
    ("", "--slurm --nodes 2 --rdzv-endpoint a:1", "--slurm takes the job's nodes"),
    ("", "--slurm --ranks-per-node 2", "this is no job of Slurm (SLURM_JOB_ID is not set)"),
    ("", "--ranks-per-node 2", "--ranks-per-node is for several nodes"),
    ("", "--nodes 2 --rdzv-endpoint localhost --ranks-per-node 1", "HOST:PORT of the first node"),
    ("", "--nodes 2 --rdzv-endpoint nowhere.invalid:1 --ranks-per-node 1", "nowhere.invalid has no address here"),
    ("", "--nodes 2 --rdzv-endpoint localhost:29400", "--ranks-per-node: by default one for each GPU"),
    ("", "--nodes 0 --rdzv-endpoint localhost:29400", "nodes: '0' is not allowed"),
    ("", "--machine ../x --list", "--machine"),
    ("emulate = true\ncommunication_steps = 2", "", "communication_steps: 2 is not allowed with emulate = true"),
    ("communication_steps = 0", "--trace", "--trace keeps profiled steps, and communication_steps = 0 has none"),
    ("", "--memory-snapshot", "--memory-snapshot records the allocator of a GPU, and this sweep runs"),
    *(
        ("", f"--part {part} --list", f"--part: {part!r} is not allowed; K/N with 1 <= K <= N <= ")
        for part in ("0/4", "5/4", "2", "1/1000", "a/b")
    ),
    ("", f"--part 1/{'9' * 5000} --list", "K/N with"),
]


@pytest.mark.parametrize(("run", "options", "said"), OPTIONS)
def test_options_that_cannot_be_meant_are_one_line(
    run: str, options: str, said: str, write_sweep: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert said in refused("sweep", write_sweep("world_size = 4", run), *options.split())


def test_include_that_is_no_list_is_one_line_where_ranks_are_emulated_too(write_sweep: Callable[..., Path]) -> None:
    path = write_sweep("world_size = 1\n[include]\nseed = 1")
    assert "include: must be a list of tables" in refused("sweep", path, "--emulate-world", 8, "--list")


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "\u202eabc", "x" * 201])
def test_a_name_of_a_model_is_printable_and_not_long(record: TrialRecord, name: str) -> None:
    with pytest.raises(SpecError, match="up to 200 printable characters"):
        replace(record.model, name=name)


@pytest.mark.parametrize("name", ["[/red]x", "[link=file:///etc]x", ":smile:", "$\\frac{1$", "org/name"])
def test_markup_in_the_name_of_a_model_is_printed_as_it_is_written(
    record: TrialRecord, name: str, tmp_path: Path
) -> None:
    store(record, name, tmp_path)
    assert stdout_of("report", tmp_path).count(name) >= 2  # in its row, and in the line that describes it


def test_escapes_in_what_a_trial_said_are_printed_as_escapes(record: TrialRecord, tmp_path: Path) -> None:
    store(replace(record, suspect=("a\x1b]0;t\x07\nb",)), "m", tmp_path)
    assert rf"suspect {record.id}: a\x1b]0;t\x07\nb" in stdout_of("report", tmp_path)


@pytest.mark.parametrize("name", ["=1+cmd|calc", "+1", "-1", "@SUM(A1)"])
def test_a_name_that_begins_like_a_formula_is_guarded_in_trials_csv_and_itself_in_python(
    record: TrialRecord, name: str, tmp_path: Path
) -> None:
    made = store(record, name, tmp_path)
    with open(made.folder / "trials.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["model"] == f"'{name}"
    assert float(row["learning_rate"]) == record.setup.learning_rate
    assert list(load_results(tmp_path)["model"]) == [name]


def store(record: TrialRecord, name: str, folder: Path) -> Store:
    """Write a record of a model of that name, and its table."""
    made = Store(folder / "m" / "s")
    named = replace(record, model=replace(record.model, name=name))
    made.open()
    made.write_record(named)
    made.write_table([named])
    made.close()
    return made


T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "num_layers": 2}


@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed")
def test_without_transformers_a_config_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "t5.json").write_text(json.dumps(T5))
    (tmp_path / "sweep.toml").write_text('[models.t5]\nhf_config = "t5.json"\n[grid]\nmodel = "t5"\n')
    with pytest.raises(SweepFileError, match=r"needs transformers: pip install .*(transformers|\[hf\])"):
        read_file(tmp_path / "sweep.toml", machine())
