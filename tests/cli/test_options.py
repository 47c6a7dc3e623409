"""The options that describe a setup: their meaning, what they refuse, and what they import."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from fsdp_bench.cli.common.options import SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.setups import read_setups, with_models
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import Precision, TrainSetup


def parse(*arguments: str, **options: Any) -> SetupOptions:
    """Run a command with the options through click, and return the values that it gets."""
    given: list[SetupOptions] = []

    @click.command(cls=SetupCommand)
    @setup_options(**options)
    @click.option("--json", "as_json", is_flag=True)
    def command(options: SetupOptions, as_json: bool) -> int:
        given.append(options)
        return 0

    command.main(list(arguments), standalone_mode=False)
    return given[0]


def read_setup(options: SetupOptions) -> tuple[Any, TrainSetup, Any]:
    """Return the model, the setup and the hardware that options with one value each mean."""
    ((reading, model),) = with_models(options)
    return model, reading.setup, reading.hardware


def test_without_options_a_setup_has_the_defaults_of_all_verbs() -> None:
    model, setup, hardware = read_setup(parse("--params", "7B"))
    assert setup == TrainSetup(precision=Precision.parse("bf16-mixed"), sequence_length=4096)
    assert hardware is None
    # The ladder's nearest to 7B: 33 layers of 4096 (tests/spec/test_model.py holds the ladder).
    assert model.hidden_size == 4096


@pytest.mark.parametrize(
    ("arguments", "world_size", "nodes", "gpus_per_node"),
    [
        ("--server p5.48xlarge", 8, 1, 8),
        ("--server p5.48xlarge --nodes 4", 32, 4, 8),
        ("--server p5.48xlarge --gpus-per-node 2", 2, 1, 2),
        ("--server p5.48xlarge --nodes 2 --gpus-per-node 4", 8, 2, 4),
        ("--server p5.48xlarge --world-size 64", 64, 8, 8),
        ("--server p5.48xlarge --world-size 4", 4, 1, 4),
        ("--server p5.48xlarge --world-size 8 --gpus-per-node 2", 8, 4, 2),
    ],
)
def test_servers_and_nodes_make_a_world(arguments: str, world_size: int, nodes: int, gpus_per_node: int) -> None:
    _, setup, hardware = read_setup(parse("--params", "1B", *arguments.split()))
    assert setup.world_size == hardware.world_size == world_size
    assert (hardware.num_nodes, hardware.gpus_per_node) == (nodes, gpus_per_node)


@pytest.mark.parametrize(
    ("arguments", "shard_size"),
    [
        ("--server p5.48xlarge --nodes 4", 8),
        ("--server p5.48xlarge --nodes 4 --gpus-per-node 2", 2),
        ("--server p5.48xlarge --world-size 16", 8),
        ("--gpu h100-sxm --nodes 2 --gpus-per-node 4", 4),
        ("--server p5.48xlarge", None),  # one node: TrainSetup's own, half of the world
        ("--world-size 16", None),  # how many nodes is unknown
        ("--server p5.48xlarge --nodes 4 --shard-size 16", 16),
    ],
)
def test_a_hybrid_strategy_shards_inside_a_node_when_there_are_several(arguments: str, shard_size: int | None) -> None:
    _, setup, _ = read_setup(parse("--params", "1B", "--strategy", "hsdp", *arguments.split()))
    assert setup.shard_size == shard_size


def test_a_gpu_alone_has_a_world_too() -> None:
    _, setup, hardware = read_setup(parse("--params", "1B", "--gpu", "b200", "--nodes", "2", "--gpus-per-node", "8"))
    assert (setup.world_size, hardware.name, hardware.has_server) == (16, "B200", False)


LISTS = ("strategy", "precision", "offload", "checkpointing")


def test_all_of_everything_is_there_also_what_cannot_run() -> None:
    everything = dict.fromkeys(LISTS, "all")
    words = parse("--world-size", "8", "--api", "fsdp2", lists=LISTS, defaults=everything)
    setups = [reading.setup for reading in read_setups(words)]
    assert len(setups) == 5 * 5 * 3 * 3  # strategies, precisions, offload, checkpointing modes
    reasons = {impossible(setup, "cuda") for setup in setups}
    assert None in reasons
    assert any(reason and "no CPU offload" in reason for reason in reasons)


def test_the_help_is_in_groups_and_says_defaults_and_what_may_be_a_list() -> None:
    @click.command(cls=SetupCommand)
    @setup_options(lists=("strategy",), defaults={"strategy": "all", "offload": "params"})
    def command(options: SetupOptions) -> int:
        return 0

    text = CliRunner().invoke(command, ["--help"], terminal_width=120).output
    assert max(map(len, text.splitlines())) <= 120
    titles = ("Model:", "Hardware:", "Sharding:", "Training step:", "Wrapping:", "Options:")
    assert (places := [text.index(title) for title in titles]) == sorted(places)
    text = " ".join(text.split()).replace("- ", "-")
    sequence = "Default: 4096, or all positions of a model that has fewer."
    others = ("Default: adamw-foreach.", "Default: bf16-mixed.", "Default: params.", "size. Default: 100M.")
    for said in ("Several by comma, or all. Default: all.", sequence, *others):
        assert text.count(said) == 1, said


ASSUMED = "note: 8 GPUs on each node are assumed; --gpus-per-node says how many\n"


@pytest.mark.parametrize(
    ("words", "world", "note"),
    [
        ({"gpu": "H100-SXM", "nodes": 4}, 32, ASSUMED),
        ({"gpu": "H100-SXM", "nodes": 4, "gpus_per_node": 2}, 8, ""),
        ({"gpu": "H100-SXM"}, 1, ""),
        ({"server": "p5.48xlarge", "nodes": 2}, 16, ""),
    ],
)
def test_eight_gpus_a_node_are_assumed_and_said_where_the_user_does_not(
    words: dict[str, Any], world: int, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, setup, _),) = read_setups(SetupOptions(**words))
    assert setup.world_size == world
    assert capsys.readouterr().err == note
