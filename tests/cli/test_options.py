"""The options that describe a setup: their meaning, what they refuse, and which recording --attention asks for."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fsdp_bench.catalog.architectures import NotRecorded, recorded_architecture
from fsdp_bench.catalog.lookup import model
from fsdp_bench.cli.common.options import SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.setups import read_model, read_setups, with_models
from fsdp_bench.plan import recording
from fsdp_bench.spec.errors import MachineError
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.setup import Precision, TrainSetup
from tests.shapes import llama_config


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


CONFIG = llama_config()


def test_eager_attention_is_recorded_with_its_config_and_sdpa_is_what_comes_with_fsdp_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    like = model("Qwen2.5-0.5B")

    def recorded_config(config: dict[str, Any], *_: Any) -> Any:
        asked.append(config)
        return like.code

    monkeypatch.setattr(recording, "recorded_config", recorded_config)
    read_model(SetupOptions(model="Qwen2.5-0.5B", attention="sdpa"))
    assert asked == []
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "attn_implementation": "eager"}))
    for options in (SetupOptions(model="Llama-3.1-8B", attention="eager"), SetupOptions(hf_config=path)):
        assert "eager" in read_model(options).name or options.hf_config
    read_model(SetupOptions(model="Llama-3.1-8B", attention="Flash_Attention_2"))
    assert [config["attn_implementation"] for config in asked] == ["eager", "eager", "flash_attention_2"]


def test_a_recording_of_sdpa_does_not_hold_for_a_config_with_other_attention() -> None:
    with pytest.raises(NotRecorded, match="attention 'eager' was not recorded"):
        recorded_architecture({**CONFIG, "attn_implementation": "eager"}, 512, "mine")
    assert recorded_architecture({**CONFIG, "attn_implementation": "sdpa"}, 512, "mine").has_fused_attention


@pytest.mark.parametrize(
    ("gpu", "precision", "is_asked"), [("T4", "fp16-mixed", True), ("T4", "fp32", False), ("L4", "bf16", False)]
)
def test_code_is_recorded_without_flash_attention_for_gpus_that_have_none(
    monkeypatch: pytest.MonkeyPatch, gpu: str, precision: str, is_asked: bool
) -> None:
    """Qwen3's does not come with fsdp-bench; where it cannot be recorded, the verdict is unknown."""
    asked: list[dict[str, Any]] = []

    def recorded_config(*_: Any, **how: Any) -> Any:
        asked.append(how)
        raise MachineError("no torch")

    monkeypatch.setattr(recording, "recorded_config", recorded_config)
    found, setup, hardware = read_setup(
        SetupOptions(model="Qwen3-0.6B", code="huggingface", gpu=gpu, step={"precision": precision})
    )
    assert asked == [{"before_sm80": True}] * is_asked
    assert found.knows_attention(hardware.gpu, setup.precision.compute) is not is_asked


def test_what_comes_with_fsdp_bench_for_older_gpus_is_no_other_models() -> None:
    options = SetupOptions(
        model="Llama-3.2-1B", code="huggingface", gpu="V100-SXM2-16GB", step={"precision": "bf16-mixed"}
    )
    found, setup, hardware = read_setup(options)
    assert found.code.origin.before_sm80
    assert found.knows_attention(hardware.gpu, setup.precision.compute)
    assert "aten::_safe_softmax" in found.some_variant.names
    assert not any("flash" in name for name in found.some_variant.names)
