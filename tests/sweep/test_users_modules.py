"""Models that a user's function returns: trials on gloo ranks, dry runs, and what cannot be meant."""

import json
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import MachineError, SpecError, SweepFileError
from fsdp_bench.spec.model_code import ModelCode
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import TrialRecord, read_record
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, UserModule
from fsdp_bench.sweep.config.sweep_file import read_file
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.dry_run import dry_runs, result_of
from fsdp_bench.train.models.user_module import loss_of
from fsdp_bench.validate.memory import compare_with_record
from tests.conftest import RUN_ON_CPU, message_of, records_of_sweep, refused, stdout_of
from tests.sweep.config.test_grid import machine
from tests.sweep.conftest import read_sweep

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("scale", torch.tensor(0.5))
    def forward(self, x):
        return x + torch.tanh(self.layer(x)) * self.scale

class Model(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.blocks, self.answer = nn.ModuleList(Block() for _ in range(2)), answer
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.answer(x)

def build(micro_batch_size, sequence_length):
    return Model(lambda x: {"loss": x.square().mean()}), {"x": torch.randn(micro_batch_size, sequence_length, 32)}

def bare():
    return Model(lambda x: x.square().mean()), torch.randn(4, 32)

def in_tuple():
    return Model(lambda x: (x.square().mean(), x)), (torch.zeros(8, 32),)

def in_dict():
    return Model(lambda x: {"loss": x.square().mean(), "logits": x}), {"x": torch.zeros(8, 32)}

def tensor():
    return Model(lambda x: x), torch.zeros(8, 32)

def per_sample():
    return Model(lambda x: {"loss": x.square().mean(1)}), torch.zeros(8, 32)

def nothing():
    return Model(lambda x: None), torch.zeros(8, 32)

def sized(micro_batch_size, sequence_length=5):
    return Model(lambda x: x.square().mean()), torch.zeros(micro_batch_size, sequence_length, 32)

def reads_values():
    return Model(lambda x: x.square().mean() * float(torch.ones(1))), torch.randn(4, 32)

def no_blocks():
    return nn.Linear(32, 1), torch.randn(4, 32)

def raises():
    raise ValueError("no such\\ndataset")

def one():
    return Model(None)

def fails_on_the_way():
    def answer(x):
        raise RuntimeError("the sizes depend on data")
    return Model(answer), torch.randn(4, 32)
"""

FIELDS = """
precision = "fp32"
gradient_accumulation_steps = 2
sequence_length = 8
micro_batch_size = 2
"""
FSDP_AND_DDP = f"""{FIELDS}
api = "fsdp2"
strategy = ["FULL_SHARD", "NO_SHARD"]
[[include]]
api = "fsdp1"
strategy = "FULL_SHARD"
checkpointing = "full"
"""
EVERY_WRAPPER = f"""{FIELDS}
api = ["fsdp1", "fsdp2"]
strategy = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
checkpointing = ["none", "full"]
"""


def write_whole(folder: Path, tables: str, run: str = "") -> Path:
    """Write a file with ``[run]`` and other tables, and the module beside it."""
    (folder / "mine.py").write_text(MODULE)
    lines = "\n".join(f"{key} = {value}" for key, value in RUN_ON_CPU.items() if f"\n{key} =" not in f"\n{run}")
    (folder / "sweep.toml").write_text(f"[run]\n{lines}\n{run}\n{tables}")
    return folder / "sweep.toml"


def write(folder: Path, table: str, grid: str = "", run: str = "") -> Path:
    return write_whole(folder, f"[models.m]\n{table}\n[grid]\nmodel = 'm'\nworld_size = 2\n{grid}\n", run)


def plan_of(folder: Path, table: str, grid: str = "") -> tuple[Trial, ...]:
    return read_sweep(write(folder, table, grid), machine())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((FSDP_AND_DDP, 3), id="FSDP1, FSDP2, DDP"),
        pytest.param((EVERY_WRAPPER, 12), id="every wrapper", marks=pytest.mark.slow),
    ],
)
def swept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[TrialRecord]:
    grid, num_trials = request.param
    run = "communication_steps = 1\nsteps_without_communication = 1"
    records = records_of_sweep(write(tmp_path_factory.mktemp("swept"), "module = 'mine:build'", grid, run))
    assert [record.outcome for record in records] == [Outcome.OK] * num_trials
    return records


def test_every_wrapper_trains_the_same_model_on_real_ranks(swept: list[TrialRecord]) -> None:
    """All ranks get the same batch, so that every wrapper's first losses are those of one rank alone."""
    losses = {rank.losses for record in swept for rank in record.ranks}
    first = next(iter(losses))
    assert len(first) == 3
    assert first[2] < first[1] < first[0]  # it learns its one batch
    for other in losses:
        assert other == pytest.approx(first, rel=1e-5)
    units = {record.ranks[0].effective.num_units for record in swept if record.effective_strategy != "NO_SHARD"}  # type: ignore[union-attr]
    assert units == {3}  # two blocks, found by themselves, and the root


def test_everything_is_measured(swept: list[TrialRecord]) -> None:
    for record in swept:
        assert (record.communication_seconds or 0) > 0
        assert len(record.ranks[0].seconds_without_communication) == 1
        assert record.tokens_per_second_per_gpu == pytest.approx(2 * 2 * 8 / (record.step_seconds or 0))
        assert record.mfu is None
        memory = record.ranks[0].memory
        sharded = record.effective_strategy != "NO_SHARD"
        whole = 4 * 2 * (32 * 32 + 32)
        assert memory.parameters_bytes == (whole // 2 if sharded else whole)
        assert memory.gradients_bytes > 0


def test_the_record_says_whose_code_it_is_and_can_be_read_again(swept: list[TrialRecord]) -> None:
    record = swept[0]
    model = record.model
    assert isinstance(model, ModelCode)
    assert (model.name, model.code, model.architecture, model.function) == ("m", "module", "Model", "mine:build")
    assert (model.num_parameters, model.num_hidden_layers) == (2 * (32 * 32 + 32), 2)
    assert model.arguments == ("micro_batch_size", "sequence_length")
    data = to_json(record)
    assert read_record(data, "again") == record
    assert json.loads(data)["model"]["code"] == "module"


def test_trials_on_a_cpu_are_not_predicted_and_the_reason_is_given(swept: list[TrialRecord]) -> None:
    assert "trials on a CPU are not predicted" in (compare_with_record(swept[0]).error or "")


SEVERAL = """[models]
bare.module = "mine:bare"
reads_values.module = "mine:reads_values"
fails.module = "mine:fails_on_the_way"
large.module = "mine:build"
no_blocks.module = "mine:no_blocks"
[grid]
world_size = 2
wrap = "block"
model = ["bare", "reads_values", "fails", "large"]
[[include]]
model = "no_blocks"
wrap = "none"
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, TrialRecord]]:
    """The file of a sweep over several models, and its records by the model's name."""
    path = write_whole(tmp_path_factory.mktemp("several"), SEVERAL, "memory_limit = '2MiB'")
    return path, {record.model.name: record for record in records_of_sweep(path, code=1)}


@pytest.mark.parametrize(
    ("name", "outcome", "said"),
    [
        *((name, Outcome.OK, "") for name in ("bare", "reads_values", "no_blocks")),
        ("fails", Outcome.CRASHED, "the sizes depend on data"),
        ("large", Outcome.OOM_HOST, "a budget, not a GPU"),  # 4096 tokens of 32 floats: 512 KiB, more in every block
    ],
)
def test_any_of_a_users_models_has_an_outcome(
    several: tuple[Path, dict[str, TrialRecord]], name: str, outcome: Outcome, said: str
) -> None:
    """A bare loss, a function that reads values, one unit; a model that fails on the way, and one beyond the budget."""
    record = several[1][name]
    assert record.outcome is outcome
    assert said in (record.reason or "")
    assert (record.final_loss is not None) is (outcome is Outcome.OK)
    assert record.tokens_per_second_per_gpu is None  # nobody says that its batch is made of tokens


def test_a_resumed_sweep_repeats_nothing_until_the_file_of_the_function_changes(
    several: tuple[Path, dict[str, TrialRecord]],
) -> None:
    path, records = several
    ids = {trial.spec.id for trial in read_sweep(path, machine())}
    assert ids == {record.id for record in records.values()}
    (path.parent / "mine.py").write_text(MODULE.replace("range(2)", "range(3)"))
    assert ids.isdisjoint(trial.spec.id for trial in read_sweep(path, machine()))


def test_a_cell_that_cannot_apply_is_skipped_with_the_reason(tmp_path: Path) -> None:
    grid = "loss = ['plain', 'chunked']\nwrap = ['block', 'size', 'block-and-ends', 'none']"
    reasons = {trial.skip_reason for trial in plan_of(tmp_path, "module = 'mine:bare'", grid)}
    assert reasons == {
        None,
        "loss: m computes its own, which chunked cannot replace; leave loss out",
        "wrap: size is not for m; use block or none",
        "wrap: block-and-ends is not for m; use block or none",
    }


def test_a_model_without_blocks_needs_their_class(tmp_path: Path) -> None:
    with pytest.raises(SweepFileError, match=r'needs the class of the blocks; transformer_block = "pkg.mod:Class"'):
        plan_of(tmp_path, "module = 'mine:no_blocks'")


def test_models_are_excluded_and_selected_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "module = 'mine:bare'\n[models.n]\nmodule = 'mine:build'")
    path.write_text(path.read_text().replace("model = 'm'", "model = ['m', 'n']"))
    path.write_text(path.read_text() + "[[exclude]]\nmodel = 'n'\nreason = 'known'\n")
    assert [trial.skip_reason for trial in read_sweep(path, machine())] == [None, "excluded: known"]
    assert "1 trials, 1 to run" in stdout_of("sweep", path, "--list", "--only", "model=m")
    assert "no trial of this sweep matches" in refused("sweep", path, "--list", "--only", "hidden_size=64")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("module = 'mine:bulid'", "[models.m] module: mine has no 'bulid' (did you mean"),
        ("module = 'yours:build'", "[models.m] module: cannot import yours"),
        ("module = 'mine'", "[models.m] module: 'mine' is not allowed; write it like"),
        ("module = 'mine:raises'", "module: mine:raises() raised ValueError: no such dataset"),
        ("module = 'mine:one'", "module: mine:one() must return (nn.Module, batch), not Model"),
        ("module = 'mine:build'\ntransformer_block = 'mine:Blok'", "transformer-block: mine has no 'Blok'"),
        ("module = 'mine:build'\nhf_config = 'a.json'", "hf_config and module each name the code; keep one"),
        ("module = 'mine:build'\nhidden_size = 3", "[models.m] unknown key 'hidden_size'"),
        ("module = 3", "[models.m] module: 3 is not allowed; a text"),
        ("module = 'mine:build'\nfolder = 'nowhere'", "cannot import mine"),
        ("hf_config = 'missing.json'", "missing.json: cannot be read: No such file"),
        ("hf_config = 'half.json'", "half.json: is not JSON"),
        ("hf_config = 'list.json'", "is not a Hugging Face config.json: not an object"),
        ("model = 'Qwen2.5-0.5'", "[models.m] model: 'Qwen2.5-0.5' is not in the catalogue (did you mean"),
        ("hf_config = 'half.json'\ncode = 'benchmark'", "[models.m] code: 'benchmark' is not allowed; huggingface"),
    ],
)
def test_a_table_that_cannot_be_meant_is_one_line(tmp_path: Path, table: str, said: str) -> None:
    (tmp_path / "half.json").write_text('{"model_type": "t5", "d_mod')
    (tmp_path / "list.json").write_text("[]")
    assert said in message_of(lambda: read_file(write(tmp_path, table), machine()), SweepFileError)


def test_a_size_that_the_function_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SweepFileError, match=r"micro_batch_size: mine:bare\(\) makes its own batch"):
        plan_of(tmp_path, "module = 'mine:bare'", "batch = 4")


def test_a_search_is_for_the_benchmarks_own_models(tmp_path: Path) -> None:
    path = write(tmp_path, "module = 'mine:build'", run="memory_limit = '1GiB'")
    path.write_text(path.read_text() + "[frontier]\ndial = 'micro_batch_size'\n")
    said = refused("sweep", path, "--list")
    assert "m is given by its code; [frontier] searches with the benchmark's own models" in said


def spec(folder: Path, function: str, **arguments: int) -> DryRunSpec:
    user = UserModule(function=f"mine:{function}", block="mine:Block", folder=str(folder), arguments=arguments)
    return DryRunSpec(module=user, setup=TrainSetup(world_size=4, micro_batch_size=3))


def test_a_model_may_answer_with_any_of_the_promised_forms(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    forms = ("bare", "in_tuple", "in_dict", "tensor", "per_sample")
    wrong = [spec(tmp_path, "nothing"), spec(tmp_path, "bare", sequence_length=99)]
    asked = [*(spec(tmp_path, form) for form in forms), spec(tmp_path, "sized", sequence_length=7), *wrong]
    answers = dict(dry_runs(asked))
    for index, form in enumerate(forms):
        result = result_of(answers[index])
        assert result.num_parameters == 2 * (32 * 32 + 32)
        assert sum(result.breakdown_bytes.values()) == result.peak_allocated_bytes
        has_logits = result.breakdown_bytes["logits"] > 0
        assert has_logits == (form == "in_dict"), form
        assert result.arguments == {}
    # --seq was asked for; the batch has no default of its own, so the setup's is passed.
    assert result_of(answers[5]).arguments == {"micro_batch_size": 3, "sequence_length": 7}
    with pytest.raises(MachineError, match=r"returned NoneType, which has no loss.*model\(\*\*batch\) for a dict"):
        result_of(answers[6])
    with pytest.raises(MachineError, match=r"seq: mine:bare\(\) makes its own batch; .* sequence_length"):
        result_of(answers[7])


def test_the_loss_is_found_by_name_before_other_tensors() -> None:
    hidden, loss = torch.ones(2, 3), torch.tensor(7.0)
    answer = namedtuple("answer", "hidden loss")
    assert loss_of(answer(hidden, loss)) == 7
    assert loss_of({"hidden": hidden, "loss": loss}) == 7
    assert loss_of((loss, hidden)) == 7
    assert loss_of(loss) == 7
    assert loss_of([torch.ones(2, dtype=torch.int64), 2 * hidden]) == 2
    assert loss_of({"loss": torch.tensor([1.0, 3.0])}) == 2
    with pytest.raises(SpecError):
        loss_of({"tokens": torch.ones(2, dtype=torch.int64)})
