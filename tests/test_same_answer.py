"""One question has one answer, whoever gives it: Python, predict, its advice, max-size, plan."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_bench import estimate, largest_model, plan_training
from fsdp_bench.catalog.lookup import model, server
from fsdp_bench.plan.prediction import answer
from fsdp_bench.plan.purchase.document import document
from fsdp_bench.plan.purchase.planner import NODES
from fsdp_bench.plan.question import Question
from fsdp_bench.plan.remedies import remedies
from fsdp_bench.report.text.plan import plan_text
from fsdp_bench.spec.setup import Precision, TrainSetup
from tests.conftest import run_command
from tests.one_memory import ONE_GPU, ROWS, Row, predicted, table
from tests.profiles import share_of_examples

few = share_of_examples(16)

SERVERS: list[dict[str, Any]] = [
    {"server": "g5.48xlarge"},
    {"server": "p5.48xlarge", "nodes": 2},
    {"server": "p4d.24xlarge", "gpus_per_node": 4},
]
servers_and_gpus = st.sampled_from([*SERVERS, {"gpu": "H100-SXM", "world_size": 8}])
settings = st.fixed_dictionaries({
    "strategy": st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
    "api": st.sampled_from(["fsdp1", "fsdp2"]),
    "precision": st.sampled_from(["bf16-mixed", "fp32", "bf16-true"]),
    "checkpointing": st.sampled_from(["none", "full"]),
    "loss": st.sampled_from(["plain", "chunked"]),
})  # fmt: skip
batches = st.sampled_from([1, 3])
headrooms = st.sampled_from(["1GiB", "4GiB"])
switches = st.sampled_from([[], ["--expandable-segments"], ["--load", "every-rank"]])
"""Options that largest_model() does not take."""


def ask(command: str, *words: object, **options: object) -> Any:
    """Return the JSON document that a command prints."""
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return json.loads(run_command(command, *words, *given, "--json").stdout)


@few
@given(servers_and_gpus, settings, batches, headrooms, switches)
def test_the_largest_model_fits_and_the_next_does_not(
    where: dict[str, Any], setting: dict[str, Any], batch: int, headroom: str, switch: list[str]
) -> None:
    options = {**where, **setting, "headroom": headroom}
    (cell,) = ask("max-size", *switch, "--no-time", batch=batch, **options)["cells"]
    if not switch:
        in_python = largest_model(**options, micro_batch_size=batch)
        assert (in_python.model and in_python.model.num_parameters) == cell["max_parameters"]
    if cell["max_parameters"] is None:
        return
    found = ask("predict", *switch, params=cell["max_parameters"], batch=batch, **options)
    for key in ("memory", "verdict", "fits"):
        assert found[key] == cell[key]
    assert (found["model"]["num_hidden_layers"], found["model"]["hidden_size"]) == (
        cell["num_hidden_layers"],
        cell["hidden_size"],
    )
    assert found["fits"] in (True, None)
    if found["fits"] is None:  # of a GPU alone the host's memory is not known
        assert found["memory"]["peak_host_bytes_per_node"] != 0
    # three digits of its parameters, which the next of the ladder may have, too
    name = re.fullmatch(r"llama-(.*)", cell["model"])
    assert ask("predict", *switch, params=name[1], batch=batch, **options)["model"]["name"] == cell["model"]
    if cell["next"] is not None:
        larger = ask("predict", *switch, params=cell["next"]["num_parameters"], batch=batch, **options)
        assert larger["fits"] is not True
        assert larger["memory"] == cell["next"]["memory"]


@few
@given(servers_and_gpus, settings, headrooms)
def test_the_largest_batch_fits_and_one_more_does_not(
    where: dict[str, Any], setting: dict[str, Any], headroom: str
) -> None:
    options = {"model": "gpt2-xl", **where, **setting, "headroom": headroom}
    (cell,) = ask("max-size", "--no-time", of="micro_batch_size", **options)["cells"]
    if cell["fits_value"] is None:
        return
    both = ask("predict", batch=f"{cell['fits_value']},{cell['next']['value']}", **options)["predictions"]
    assert both[0]["verdict"] == cell["verdict"]
    assert [one["fits"] is not False for one in both] == [True, False]


@pytest.mark.parametrize("where", SERVERS, ids=["one server", "several nodes", "some of the GPUs"])
@few
@example(setting={}, headroom="1GiB", gpu_memory="12GiB")
@given(setting=settings, headroom=headrooms, gpu_memory=st.sampled_from(["8GiB", "12GiB", "16GiB"]))
def test_python_and_predict_say_the_same_and_what_is_missing_or_left_is_one_number(
    where: dict[str, Any], setting: dict[str, Any], headroom: str, gpu_memory: str
) -> None:
    options = {"model": "1B", **where, **setting, "headroom": headroom, "gpu_memory": gpu_memory}
    printed, found = ask("predict", **options), estimate(**options)
    assert (printed["verdict"], printed["fits"]) == (found.verdict, found.fits)
    assert printed["time"]["step_seconds"] == found.step_seconds
    memory, row = printed["memory"], found.row()
    left = printed["server"]["gpu_memory_bytes"] - memory["needed_bytes"]
    assert printed["headroom_bytes"] == found.headroom_bytes == row["headroom_bytes"] == left
    for key in ("needed_bytes", "peak_allocated_bytes", "peak_reserved_bytes"):
        assert row[key] == memory[key]


@few
@given(st.sampled_from(["g5.48xlarge", "p4d.24xlarge", "p5.48xlarge"]), st.sampled_from(["20B", "13B", "7B"]), settings)
def test_a_plan_has_the_fewest_nodes_that_fit(where: str, size: str, setting: dict[str, Any]) -> None:
    """A plan lets segments expand where that is what makes a setting fit."""
    fixed = {**setting, "offload": "none", "micro_batch_size": 1, "sequence_length": 2048}
    nodes = range(1, 5)
    fitting = [
        count
        for count in nodes
        if any(
            estimate(size, server=where, nodes=count, expandable_segments=segments, **fixed).fits
            for segments in (False, True)
        )
    ]
    planned = plan_training(size, servers=[where], nodes=nodes, **fixed).picked.fewest_nodes
    assert (planned and planned.cluster.num_nodes) == min(fitting, default=None)


HUGGING_FACE: dict[str, Any] = {"model": "gpt2", "code": "huggingface", "gpu_memory": "6GiB"}
"""A question about Hugging Face's code."""
NODE, ALONE = {"server": "g5.48xlarge"}, {"server": "g5.48xlarge", "gpus_per_node": 1}
LAST_ONLY = {"gradient_accumulation_steps": 4, "sync_every_micro_batch": False}
TRAINER: list[Any] = [
    (NODE, {}, {"api": "fsdp2", "strategy": "FULL_SHARD"}, "--api fsdp1"),
    (NODE, {"accumulate": 4}, LAST_ONLY, "--sync-every-micro-batch"),
    (ALONE, {}, {"api": "fsdp2", "strategy": "NO_SHARD"}, "--strategy FULL_SHARD"),
]
"""Where, what the user states, the setup that is meant, and the option that the assumption names; plan/test_defaults.py
has what the Trainer does where more is stated."""


@pytest.mark.parametrize(("where", "stated", "meant", "opposite"), TRAINER)
def test_hugging_faces_code_is_trained_as_the_trainer_trains_it_in_every_answer(
    where: dict[str, Any], stated: dict[str, Any], meant: dict[str, Any], opposite: str
) -> None:
    """TrainingArguments and Trainer of transformers 5.23, as plan/defaults.py cites them."""
    options = {**HUGGING_FACE, **where, **stated}
    found = [ask("predict", **options)]
    sizes = {"of": "micro_batch_size", "strategy": meant.get("strategy", "FULL_SHARD"), **options}
    found += ask("max-size", "--no-time", **sizes)["cells"]
    python = estimate(**HUGGING_FACE, **where, gradient_accumulation_steps=stated.get("accumulate", 1))
    for one in found:
        assert {name: one["setup"][name] for name in meant} == meant
        assert opposite in one["assumptions"][-1]
    assert {name: getattr(python.setup, name) for name in meant} == meant
    assert python.memory.peak_allocated_bytes == found[0]["memory"]["peak_allocated_bytes"]


@pytest.mark.parametrize(
    ("code", "is_trainer"), [("huggingface", True), pytest.param("benchmark", False, marks=pytest.mark.slow)]
)
def test_a_plan_trains_hugging_faces_code_as_the_trainer_does(code: str, is_trainer: bool) -> None:
    asked: dict[str, Any] = {"model": "gpt2", "code": code, "nodes": 1, "loss": "plain", "checkpointing": "none"}
    winner = ask("plan", server="g5.48xlarge", global_batch="1M", **asked)["winner"]
    assert winner["setup"]["sync_every_micro_batch"] is not is_trainer
    assert bool(winner["assumptions"]) is is_trainer
    assert not is_trainer or winner["setup"]["api"] == "fsdp2"
    found = plan_training(servers="g5.48xlarge", global_batch="1M", **{**asked, "nodes": [1]})
    setup = found.picked.winner.timed.setup
    assert (setup.api.value, setup.sync_every_micro_batch) == (
        winner["setup"]["api"],
        winner["setup"]["sync_every_micro_batch"],
    )
    assert ("\n  as transformers' Trainer: " in plan_text(document(found, with_step=False))) is is_trainer


@pytest.mark.parametrize(
    ("name", "where", "nodes"),
    [
        ("Llama-3.1-8B", "g5.48xlarge", range(1, 5)),
        pytest.param("Llama-3.1-8B", "g5.48xlarge", NODES, marks=pytest.mark.slow),
        pytest.param("30B", "p4d.24xlarge", NODES, marks=pytest.mark.slow),
        pytest.param("Llama-3.1-70B", "p4de.24xlarge", NODES, marks=pytest.mark.slow),
    ],
)
def test_predict_advises_the_fewest_nodes_of_a_plan(name: str, where: str, nodes: Iterable[int]) -> None:
    setup = TrainSetup(world_size=8, sequence_length=4096, precision=Precision.parse("bf16-mixed"))
    advised = remedies(answer(Question(model(name, 4096), setup, server(where))))
    advised_nodes = [int(found[1]) for one in advised if (found := re.search(r"--nodes (\d+)", one.switch))]
    fixed = {"sequence_length": 4096, "offload": "none", "micro_batch_size": 1}
    planned = plan_training(name, servers=[where], nodes=nodes, **fixed).picked.fewest_nodes
    assert min(advised_nodes) == planned.cluster.num_nodes


@pytest.mark.parametrize(
    "stated",
    [
        {"strategy": "zero3", "api": "fsdp2"},
        pytest.param({"strategy": "zero3"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "zero3", "api": "fsdp1", "loss": "plain"}, marks=pytest.mark.slow),
    ],
)
def test_max_size_names_the_fewest_gpus_of_a_plan(stated: dict[str, Any]) -> None:
    """Settings that are not stated are chosen in both: plain losses of an 8B do not fit on up to 512 g5.48xlarge."""
    asked = {"model": "Llama-3.1-8B", "server": "g5.48xlarge", "seq": 2048, "checkpointing": "full", **stated}
    found = ask("max-size", "--no-time", of="gpus", **asked)
    fits = [cell["fits_value"] for cell in found["cells"] if cell["fits_value"] is not None]
    if "on_fewest" in found:
        fits.append(found["on_fewest"]["setup"]["world_size"])
    fewest = ask("plan", nodes="1-4", offload="none", batch=1, **asked)["fewest_nodes"]
    assert min(fits, default=None) == (fewest and fewest["num_gpus"])


def test_a_headline_with_offload_says_how_slow_it_is() -> None:
    asked = ("--server", "g5.48xlarge", "--offload", "params", "--strategy", "zero3", "--checkpointing", "full")
    first = run_command("max-size", "--model", "gpt2", "--of", "gpus", "--seq", 512, *asked).stdout.split("\n\n")[0]
    assert re.search(r", [\d,]+ tokens/s per GPU", " ".join(first.split()))


IN_EVERY_RUN = [ROWS[1], ROWS[2], ROWS[8]]
"""Under fsdp2: trained whole, without checkpointing and with a window, in 4 bits."""


def test_a_plan_of_one_gpu_trains_without_fsdp_as_predict_does(tmp_path: Path) -> None:
    """Also where DDP on more of them would not fit: GPT-2's gradients are in buckets a second time, 0.5 GB."""
    (tmp_path / "servers.toml").write_text(ONE_GPU.format(gpu="RTX-4090"))
    asked = {"model": "gpt2", "code": "huggingface", "server": "one-RTX-4090", "seq": 256, "batch": 1, "loss": "plain"}
    asked |= {"checkpointing": "none", "catalog": tmp_path / "servers.toml"}
    found = ask("predict", **asked)
    kept = found["headroom_bytes"] - 2**24
    for nodes in ("1", "1-2"):
        winner = ask("plan", nodes=nodes, headroom=f"{kept}B", strategy="ddp", **asked)["winner"]
        assert winner["num_gpus"] == 1
        assert winner["memory"]["peak_reserved_bytes"] == found["memory"]["needed_bytes"]
        assert winner["setup"]["strategy"] == found["setup"]["strategy"] == "NO_SHARD"
    assert ask("plan", nodes="1", **asked)["winner"]["setup"]["strategy"] == "NO_SHARD"


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=() if row in IN_EVERY_RUN else pytest.mark.slow) for row in ROWS]
)
def test_the_table_of_four_commands_has_what_three_of_them_say(row: Row, tmp_path: Path) -> None:
    """The fourth is a rehearsal: tests/on_stand_in/plan/test_exported_scripts.py."""
    found = predicted(row, tmp_path)
    assert found.apart_gib == 0
    assert table()[ROWS.index(row)].startswith(found.line(row))
