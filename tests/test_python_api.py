"""The Python API: every name is listed and typed, and each call takes names."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest
from msgspec.structs import replace

import fsdp_bench
from fsdp_bench import (
    Checkpointing,
    Family,
    ModelShape,
    Precision,
    ShardingStrategy,
    SpecError,
    TrainSetup,
    UserError,
    estimate,
    largest_model,
    model,
    plan_training,
    server,
)
from fsdp_bench.plan.question import Question, speed_of
from fsdp_bench.plan.search.search import FitCheck, find_largest
from fsdp_bench.spec.setup import SetupFields
from fsdp_bench.sweep.session import Watcher
from tests.conftest import message_of
from tests.shapes import estimate_of

LLAMA = "Llama-3.1-8B"


def test_every_public_name_is_listed_and_loads() -> None:
    assert dir(fsdp_bench) == sorted(fsdp_bench.__all__)
    for name in fsdp_bench.__all__:
        assert getattr(fsdp_bench, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        fsdp_bench.nope  # noqa: B018


def test_importing_the_package_loads_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import fsdp_bench; dir(fsdp_bench)\n"
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['fsdp_bench', 'fsdp_bench.version']"


def test_sweep_can_be_called_whatever_was_imported_before() -> None:
    """The package of that name, once imported, is what Python finds first."""
    program = (
        "import fsdp_bench.sweep.results.store, fsdp_bench\n"
        "from fsdp_bench import sweep\n"
        "for call in (sweep, fsdp_bench.sweep):\n"
        "    try: call('nope.toml')\n"
        "    except fsdp_bench.SweepFileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.count("nope.toml: no such file") == 2


def test_the_keywords_of_the_calls_are_the_fields_of_a_setup() -> None:
    assert set(SetupFields.__annotations__) == set(TrainSetup.__struct_fields__)


def test_names_and_objects_are_the_same_question() -> None:
    cluster = server("p5.48xlarge", nodes=2)
    shape = model(LLAMA)
    setup = TrainSetup(
        strategy=ShardingStrategy.FULL_SHARD,
        precision=Precision.parse("bf16-mixed"),
        checkpointing=Checkpointing.FULL,
        world_size=16,
        sequence_length=4096,
    )
    by_name = estimate(LLAMA, server="P5.48XLARGE", nodes=2, strategy="zero3", precision="BF16", checkpointing="Full")
    asked = [
        by_name,
        estimate(shape, setup, cluster),
        estimate(LLAMA, replace(setup, world_size=8), server="p5.48xlarge", world_size=16),
    ]
    for found in asked:
        assert (found.model, found.setup, found.hardware) == (shape, setup, cluster)
    expected = estimate_of(shape, setup, cluster)
    assert by_name.memory == expected.memory
    assert (by_name.fits, by_name.headroom_bytes) == (expected.fits, expected.headroom_bytes)
    assert by_name.step_seconds == speed_of(Question(shape, setup, cluster)).time.step_seconds
    assert by_name.step_seconds is not None


def test_a_model_is_a_name_a_size_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, **sizes}))
    assert model(path) == model(str(path))
    assert model("meta-llama/llama-3.1-8b").name == LLAMA
    assert model("7b").num_hidden_layers == 33
    assert model("124M", 2048, "GPT2").max_position_embeddings == 2048
    assert isinstance(estimate(path, world_size=2, code="benchmark").model, ModelShape)
    assert estimate(hf_config=path, world_size=2).model.num_parameters == model(path).num_parameters
    with pytest.raises(SpecError, match="name the model, or hf_config"):
        estimate(world_size=2)


def test_answers_are_tables_in_a_notebook() -> None:
    """docs/python.md prints and compares what else calls return."""
    table = ElementTree.fromstring(estimate("gpt2", gpus="16 x H100-SXM", strategy="zero2")._repr_html_())
    assert [th.text for th in table.iter("th")] == ["server", "peak allocated", "fits", "step time"]
    fixed = {"checkpointing": "full", "loss": "plain", "strategy": "zero3", "api": "fsdp2"}
    found = plan_training("1B", "1B", servers=["p4d.24xlarge"], nodes=[1], **fixed)
    assert set(pandas.DataFrame(found.rows())["server"]) == {"p4d.24xlarge"}
    assert found.reason in found._repr_html_()


def test_the_largest_model_is_one_call() -> None:
    found = largest_model(server="g5.48xlarge", precision="bf16", checkpointing="full", sequence_length=2048)
    assert found.at.setup.world_size == 8
    assert largest_model(found.at.setup, server("g5.48xlarge")).model == found.model
    assert find_largest(found.quantity, FitCheck()).at == found.at
    assert repr(found).startswith(f"largest model that fits: {found.model.name}: FULL_SHARD under fsdp1, 8 ranks")
    assert largest_model(found.at.setup, server("g5.48xlarge"), headroom="9GiB").fits < found.fits
    smaller = largest_model(gpu="H100-SXM", gpu_memory="8GiB", family=Family.GPT2)
    assert smaller.model.num_parameters < found.model.num_parameters


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: plan_training("1B", "1B", apii="fsdp1"), "unknown field 'apii' (did you mean 'api'?)"),
        (lambda: plan_training("1B", precision=["fp32", "bf16"]), "precision: several values; plan_training chooses"),
        (lambda: plan_training(), "plan_training: name the model, or hf_config"),
        (lambda: plan_training("1B", deadline="30d"), "deadline and budget need --tokens"),
        (lambda: estimate("Lama-3.1-8B"), "model: 'Lama-3.1-8B' is not in the catalogue (did you mean"),
        (lambda: estimate(8), "model: 8 is not allowed; a name of the catalogue"),
        (lambda: estimate(LLAMA, "zero3"), "setup: 'zero3' is not allowed; a TrainSetup"),
        (lambda: estimate(LLAMA, None, "p5.48xlarge"), "hardware: 'p5.48xlarge' is not allowed; a Hardware, or its"),
        (lambda: estimate(LLAMA, stratgy="zero3"), "unknown field 'stratgy' (did you mean 'strategy'?)"),
        (
            lambda: estimate("gpt2", gpus="H100-SXM"),
            "gpus: 'H100-SXM' is not allowed; how many of which GPU, like '8 x",
        ),
        (
            lambda: estimate("gpt2", gpus="12 x H100-SXM"),
            "gpus: 12 is not allowed; a multiple of the 8 GPUs of a p5.48",
        ),
        (lambda: estimate("gpt2", gpus="8 x H1000"), "H100"),
        (
            lambda: estimate(LLAMA, None, server("DGX-A100"), gpu="H200"),
            "hardware: it says where; leave out gpu, server",
        ),
        (lambda: estimate(LLAMA, TrainSetup(world_size=4), server("p5.48xlarge")), "is not the cluster's 8 GPUs"),
        (lambda: estimate(LLAMA, server="p5.48xlarge", nodes="2"), "nodes: '2' is not allowed; a whole number"),
        (lambda: estimate(LLAMA, server="p5.48xlarge", nodes=0), "nodes: 0 is not allowed; 1 or more"),
        (lambda: estimate(LLAMA, kernels="gpu"), "kernels: 'gpu' is not allowed; one of cuda, cpu"),
        (lambda: estimate(LLAMA, build="x"), "build: 'x' is not allowed; one of meta, rank-0, every-rank"),
        (lambda: estimate(LLAMA, calibration=3), "calibration: 3 is not allowed; a Profile"),
        (lambda: largest_model(gpu="H200", family="bert"), "family: 'bert' is not allowed; one of llama, gpt2"),
        (lambda: server("p5.48xlarge", nodes=2.5), "num_nodes: 2.5 is not allowed; a whole number"),
        (lambda: fsdp_bench.sweep("x.toml", retry="ok"), "retry: 'ok' is not allowed; one of crashed, timeout"),
        (lambda: fsdp_bench.sweep("x.toml", emulate_world=0), "emulate-world: 0 is not allowed; 1 or more"),
        (lambda: fsdp_bench.sweep(7), "file: 7 is not allowed; a path"),
        (lambda: fsdp_bench.load_results("no/such/folder"), "no/such/folder: no results here"),
        (lambda: fsdp_bench.dry_run(LLAMA, checkpointing="fulll"), "(did you mean 'full'?)"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(call: Callable[[], Any], said: str) -> None:
    assert said in message_of(call, UserError)


def test_a_sweep_is_one_call_and_resumes(write_sweep: Callable[..., Path], tmp_path: Path) -> None:
    class Counting(Watcher):
        ended = 0

        def trial(self, trial: Any, record: Any) -> None:
            self.ended += record is not None

    file, watcher = write_sweep("strategy = ['zero3', 'ddp']"), Counting()
    found = fsdp_bench.sweep(file, results=tmp_path / "results", watcher=watcher)
    assert [record.outcome for record in found.records] == ["ok", "ok"]
    assert found.table["strategy"].tolist() == ["FULL_SHARD", "NO_SHARD"]
    assert (found.folder / "trials.csv").exists()
    assert not found.failed
    assert repr(found) == f"SweepResults(tiny: 2 trials: 2 ok; {found.folder})"
    again = fsdp_bench.sweep(file, results=tmp_path / "results", only="strategy=ddp", watcher=watcher)
    assert watcher.ended == 2
    assert again.records == found.records[1:]
    assert again.all_records == found.records


def test_spec_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="world_size"):
        TrainSetup(world_size=0)
    assert issubclass(SpecError, UserError)
