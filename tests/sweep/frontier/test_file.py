"""[frontier] of a sweep file: what is searched, and what is said about one that is wrong."""

from itertools import pairwise
from pathlib import Path

import pytest

from fsdp_bench.simulate.operators.kernels import CPU_GLOO
from fsdp_bench.spec.errors import UserError
from fsdp_bench.spec.frontier import FrontierRecord, read_frontier
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.config.trial import SweepPlan
from fsdp_bench.sweep.frontier.cell import forecast
from fsdp_bench.sweep.frontier.file import RESOLUTION, Search, gpu_of, searches_of
from fsdp_bench.sweep.machine import GpuDevice
from fsdp_bench.sweep.results.load import read_records
from fsdp_bench.sweep.start import select
from tests.conftest import TINY_MODEL, message_of
from tests.shapes import memory_of
from tests.sweep.config.test_grid import GPUS, machine

GIB = 1024**3
CPU = "[run]\ndevice='cpu'\nmemory_limit='64MiB'\n"
LADDER = "[frontier]\nlargest='100M'\n[grid]\nworld_size=2\n"
DEPTH = "[frontier]\nof='num_hidden_layers'\n[grid]\nmodel='tiny'\n"


def read(
    tmp_path: Path, text: str, gpus: tuple[GpuDevice, ...] = (), gpu_memory_bytes: int | None = None
) -> SweepPlan[Search]:
    path = tmp_path / "file.toml"
    path.write_text(text + TINY_MODEL)
    return searches_of(read_file(path, machine(gpus), gpu_memory_bytes))


def test_the_ladder_is_the_default_and_keeps_the_vocabulary_and_the_bounds(tmp_path: Path) -> None:
    text = CPU + "[frontier]\nsmallest='20M'\nlargest='100M'\n[grid]\nvocab_size=4096\nstrategy=['zero3','ddp']"
    plan = read(tmp_path, text)
    assert [search.setup.strategy.value for search in plan.cells] == ["FULL_SHARD", "NO_SHARD"]
    quantity = plan.cells[0].quantity
    assert quantity.name == "num_parameters"
    assert 20e6 <= quantity.values[0] < 24e6
    assert 90e6 <= quantity.values[-1] <= 100e6
    assert all(quantity[index].model.vocab_size == 4096 for index in range(len(quantity)))
    trial = plan.cells[0].trial(3)
    assert trial.spec.model.num_parameters == quantity.values[3]
    assert trial.spec.run.memory_limit_bytes == 64 * 1024**2


@pytest.mark.parametrize(
    ("word", "field"), [("num_hidden_layers", "model"), ("micro_batch_size", "setup"), ("sequence_length", "setup")]
)
def test_other_quantities_are_a_field_of_a_named_model(tmp_path: Path, word: str, field: str) -> None:
    (search,) = read(tmp_path, CPU + f"[frontier]\nof='{word}'\n[grid]\nmodel='tiny'").cells
    value = search.quantity.values[2]
    assert getattr(getattr(search.trial(2).spec, field), word) == value
    steps = search.quantity.values
    assert all(larger >= RESOLUTION * smaller for smaller, larger in pairwise(steps))


def test_equal_cells_are_one_search_and_excluded_or_impossible_ones_are_skipped(tmp_path: Path) -> None:
    text = CPU + LADDER + "strategy=['zero3','FULL_SHARD','ddp','hsdp']\n"
    plan = read(tmp_path, text + "[[exclude]]\nstrategy='NO_SHARD'\nreason='known'")
    reasons = [search.skip_reason or "" for search in plan.cells]
    assert reasons[:2] == ["", "excluded: known"]
    assert "use 4 or more ranks" in reasons[2]


def test_only_keeps_cells_by_field_and_refuses_what_is_not_one(tmp_path: Path) -> None:
    plan = read(tmp_path, CPU + LADDER + "strategy=['zero3','ddp']\napi=['fsdp1','fsdp2']")
    assert len(select(plan, ()).cells) == 4
    (kept,) = select(plan, ("strategy=zero3", "api=fsdp2")).cells
    assert kept.setup.strategy.value == "FULL_SHARD"
    for word, part in (("abc123", "cells, not trials"), ("stratgy=x", "did you mean 'strategy'")):
        with pytest.raises(UserError, match=part):
            select(plan, (word,))
    with pytest.raises(UserError, match="no cell of this sweep matches"):
        select(plan, ("world_size=8",))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (CPU + "[frontier]\nsmalest='1M'", ["[frontier]", "'smalest'", "did you mean 'smallest'"]),
        (CPU + "[frontier]\nof='depth'", ["[frontier] of", "'depth'", "num_hidden_layers"]),
        (CPU + LADDER + "params='10M'", ["[grid] params", "searches 'params'"]),
        (CPU + LADDER + "model='tiny'", ["[grid] model", "searches 'params'"]),
        (CPU + DEPTH.replace("model=", "num_hidden_layers=3\nmodel="), ["unknown key 'num_hidden_layers'"]),
        (CPU + "[frontier]\nof='sequence_length'\n[grid]\nmodel='tiny'\nseq=128", ["[grid] sequence_length"]),
        (CPU + "[frontier]\nof='micro_batch_size'\n[grid]\nbatch=1\nmodel='tiny'", ["[grid] micro_batch_size"]),
        (CPU + "[frontier]\nof='micro_batch_size'\n[grid]\nworld_size=2", ["[grid]", "names no model"]),
        (CPU + LADDER + "[[exclude]]\nparams='10M'\nreason='x'", ["[[exclude]] 1 params"]),
        (CPU + LADDER.replace("'100M'", "'100Q'"), ["[frontier] largest", "'100Q'"]),
        (CPU + LADDER.replace("'100M'", "'1K'"), ["[frontier]", "no value"]),
        (CPU + "[frontier]\nsmallest='2M'\nlargest='1M'\n[grid]\nworld_size=2", ["smallest", "above largest"]),
        (CPU + DEPTH.replace("[grid]", "largest='9'\n[grid]"), ["[frontier] largest", "'9'", "1 or more"]),
        ("[run]\ndevice='cpu'\n" + LADDER, ["needs [run] memory_limit"]),
        (CPU + LADDER + "family='gpt3'", ["[grid] family", "gpt3"]),
        (CPU + LADDER + "vocab_size=1", ["[grid] vocab_size"]),
        (CPU + LADDER + "strategy='hsdp'", ["no cell can run here"]),
        (CPU + "[frontier]", ["grid is empty"]),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = message_of(lambda: read(tmp_path, text), UserError)
    for part in ["file.toml", *parts]:
        assert part in message


def test_a_large_gpu_is_limited_to_a_small_ones_memory_and_says_so(tmp_path: Path) -> None:
    text = "[frontier]\nsmallest='100M'\n[grid]\nworld_size='gpus'\nprecision='bf16-mixed'\ncheckpointing='full'"
    whole, small = read(tmp_path, text, GPUS), read(tmp_path, text, GPUS, 24 * GIB)
    for plan, said in ((whole, ("file", False, None)), (small, ("file-on-24GiB", True, 24 * GIB))):
        assert (plan.file.name, plan.file.gpu_is_limited, plan.file.run.memory_limit_bytes) == said
    assert whole.cells[0].trial(0).spec.id != small.cells[0].trial(0).spec.id
    large_fits, small_fits = forecast(whole.cells[0]).fits, forecast(small.cells[0]).fits
    assert 0 < small_fits < large_fits
    path = tmp_path / "file.toml"
    card = gpu_of(read_file(path, machine(GPUS), 24 * GIB))
    assert (card.name.startswith("H100"), card.usable_memory_bytes) == (True, 24 * GIB)


def test_gpu_memory_is_refused_on_a_cpu_and_above_what_the_card_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--gpu-memory: this sweep runs on a CPU"):
        read(tmp_path, CPU + LADDER, (), 24 * GIB)
    with pytest.raises(UserError, match=r"--gpu-memory: 96.0 GiB is not allowed; a GPU here has 80.0 GiB"):
        read(tmp_path, LADDER, GPUS, 96 * GIB)


def test_a_card_that_is_not_in_the_catalogue_has_no_prediction_and_says_so(tmp_path: Path) -> None:
    unknown = (GpuDevice(index=0, name="Homemade 9000", memory_bytes=80 * GIB),)
    (search,) = read(tmp_path, "[frontier]\n[grid]\nworld_size=1", unknown).cells
    found = forecast(search)
    assert found.fits is None
    assert "no prediction" in (found.why_not or "")


@pytest.mark.parametrize("name", ["max-size-quick.toml", "max-size-gpu.toml"])
def test_the_shipped_frontiers_resolve_on_eight_gpus(name: str) -> None:
    plan = searches_of(read_file(Path(__file__).parents[3] / "sweeps" / name, machine(GPUS)))
    assert 30 <= sum(search.skip_reason is None for search in plan.cells) <= 40


FOLDER = Path(__file__).parents[3] / "results" / "xeon-2-cores" / "max-size-quick"


@pytest.fixture(scope="module")
def measured() -> FrontierRecord:
    return read_frontier((FOLDER / "frontier.json").read_bytes(), "frontier.json")


def test_predicted_and_measured_are_the_same_step_in_9_of_10_cells_and_never_more_than_one_apart(
    measured: FrontierRecord,
) -> None:
    apart = [cell.steps_apart for cell in measured.cells if cell.status != "skipped"]
    assert len(apart) >= 30
    assert None not in apart
    assert apart.count(0) >= 0.9 * len(apart)
    assert {abs(steps or 0) for steps in apart} <= {0, 1}


def test_no_cell_took_more_than_4_trials(measured: FrontierRecord) -> None:
    assert max(len(cell.trials) for cell in measured.cells) <= 4


def test_todays_prediction_tells_of_every_trial_whether_it_ran_out() -> None:
    records = read_records(FOLDER)
    assert {record.outcome for record in records} == {Outcome.OK, Outcome.OOM_HOST}
    for record in records:
        predicted = memory_of(record.model, record.setup, CPU_GLOO).peak_allocated_bytes
        fits = predicted <= (record.run.memory_limit_bytes or 0)
        assert fits == (record.outcome is Outcome.OK), f"{record.id}: predicted {predicted}, {record.outcome}"
