"""accelerate's arguments and config files, read by accelerate itself, give one rank what accelerate would give it."""

import re
import sys
from pathlib import Path

import accelerate
import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from fsdp_bench.rehearse.inside.launch import Launch, rank_environment, understand
from tests.rehearse.inside.conftest import _folder_with_a_script, assert_given, given_by  # noqa: F401


def config_of(fsdp: dict[str, object], **fields: object) -> str:
    """Return the text that ``accelerate config`` writes for two ranks of one node, with other fields."""
    asked = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16"}
    answers = {"use_cpu": False, "debug": False, "same_network": True, "num_processes": 2}
    return yaml.safe_dump(ClusterConfig(**{**asked, **answers, "fsdp_config": fsdp, **fields}).to_dict())


BOTH = {
    **{"fsdp_activation_checkpointing": True, "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_offload_params": False},
    **{"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True, "fsdp_forward_prefetch": False},
    **{"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
}
FSDP1 = BOTH | {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_use_orig_params": True}
FSDP1_CONFIG = config_of(FSDP1)
FSDP2_CONFIG = config_of(BOTH | {"fsdp_reshard_after_forward": True, "fsdp_version": 2})
TWO_NODES_CONFIG = config_of(
    FSDP1, num_processes=16, num_machines=2, machine_rank=1, main_process_ip="far.away", main_process_port=29501
)


has_fsdp2 = tuple(int(part) for part in accelerate.__version__.split(".")[:2]) >= (1, 6)


def read(line: str, world_size: int = 64, rank: int = 0) -> Launch:
    return understand("accelerate", line.split(), rank, world_size, 8)


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("--config_file config.yaml", FSDP1_CONFIG),
        pytest.param("--config_file config.yaml --mixed_precision fp16", FSDP1_CONFIG, marks=pytest.mark.slow),
        pytest.param(
            "--config_file config.yaml --fsdp_offload_params true",
            FSDP2_CONFIG,
            marks=pytest.mark.skipif(not has_fsdp2, reason="fsdp_version came with accelerate 1.6"),
        ),
        ("--use_fsdp --num_processes 2 --fsdp_sharding_strategy SHARD_GRAD_OP --max_restarts 2", ""),
        pytest.param(
            *("--multi-gpu --num-processes 2 --dynamo_backend inductor --num_cpu_threads_per_process 3", ""),
            marks=pytest.mark.slow,
        ),
        pytest.param("--multi_gpu --num_processes 2 --same_network --debug", "", marks=pytest.mark.slow),
        ("--num_processes 1", ""),
    ],
)
def test_a_rank_is_given_what_accelerate_gives(words: str, config: str) -> None:
    """Expected: the environment of a process that accelerate itself started."""
    Path("config.yaml").write_text(config)
    rank = "alone" if words == "--num_processes 1" else "0"
    given = given_by("accelerate.commands.launch", *words.split(), "train.py", rank=rank)
    world_size = int(given.get("WORLD_SIZE", 1))
    launch = read(f"{words} train.py", world_size)
    assert launch.gives_ranks == ("RANK" in given)
    assert launch.num_processes == launch.processes_per_node == world_size
    ours = {**(rank_environment(0, world_size, 8) if launch.gives_ranks else {}), **launch.environment}
    assert_given(ours, given)


def test_the_default_config_file_counts_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.commands.config.config_args as config_args
    import accelerate.commands.launch as accelerate_launch

    config = tmp_path / "default_config.yaml"
    config.write_text(FSDP1_CONFIG)
    for module in (config_args, accelerate_launch):
        monkeypatch.setattr(module, "default_config_file", str(config))
    launch = read("train.py")
    assert launch.environment["FSDP_SHARDING_STRATEGY"] == "HYBRID_SHARD"
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launch.sentence == f"accelerate launch train.py, with {config}: replaced by rank 0 of 64, 8 a node"


def test_the_nodes_of_a_config_file_are_replaced() -> None:
    Path("config.yaml").write_text(TWO_NODES_CONFIG)
    launch = read("--config_file config.yaml train.py --x")
    assert (launch.num_processes, launch.processes_per_node) == (16, 8)
    assert launch.arguments == ["--x"]
    assert launch.environment.keys() & {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "NODE_RANK"} == set()
    said = "accelerate launch --config_file config.yaml train.py"
    assert launch.sentence == f"{said}: replaced by rank 0 of 64, 8 a node"


@pytest.mark.parametrize(
    ("words", "world_size", "gives_ranks", "num_processes"),
    [
        ("train.py", 64, True, None),  # accelerate counts the GPUs of the cluster's node
        ("train.py", 1, False, None),
        ("--num_processes 1 train.py", 64, True, 1),
        ("--num_processes 8 train.py", 1, False, 8),
        ("--multi_gpu --num_processes 8 train.py", 1, True, 8),
        ("--use_fsdp --num_processes 1 train.py", 1, True, 1),
    ],
)
def test_the_world_that_is_asked_for_decides_and_not_this_machines_gpus(
    words: str, world_size: int, gives_ranks: bool, num_processes: int | None
) -> None:
    launch = read(words, world_size)
    assert (launch.gives_ranks, launch.num_processes) == (gives_ranks, num_processes)


@pytest.mark.parametrize("words", ["train.py", "--use_fsdp --num_processes 8 --mixed_precision bf16 train.py"])
def test_cuda_is_left_alone_until_the_script_asks_for_it(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "device_count", "is_bf16_supported", "current_device"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_: pytest.fail("asked CUDA"))
    assert read(words).gives_ranks


def test_gpus_that_are_chosen_by_number_are_replaced() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in read("--gpu_ids 2,3 --num_processes 2 train.py").environment


def test_modules_and_python_commands_are_started() -> None:
    assert (read("-m pkg.train --x").kind, read("-m pkg.train --x").target) == ("module", "pkg.train")
    assert read("--no_python python -m pkg").kind == "module"


@pytest.mark.parametrize(
    ("words", "config", "said"),
    [
        ("", "", "the following arguments are required: training_script"),
        ("--no_such_option train.py", "", "accelerate launch: "),
        ("nowhere.py", "", "the script nowhere.py is not in"),
        ("--use_deepspeed --num_processes 8 train.py", "", "DeepSpeed cannot be rehearsed"),
        ("--use_megatron_lm --num_processes 8 train.py", "", "Megatron-LM cannot be rehearsed"),
        ("--tpu train.py", "", "a TPU cannot be rehearsed"),
        ("--cpu --num_processes 2 train.py", "", "training on CPUs cannot be rehearsed"),
        ("--mpirun_hostfile hosts --num_processes 2 train.py", "", "MPI cannot be rehearsed"),
        (
            "--config_file config.yaml train.py",
            "distributed_type: DEEPSPEED\nnum_processes: 2\n",
            "DeepSpeed cannot be rehearsed",
        ),
        ("--config_file config.yaml train.py", "distributed_type: MULTI_CPU\nnum_processes: 2\n", "on CPUs cannot"),
        ("--config_file config.yaml train.py", "distributed_type: XLA\nnum_processes: 2\n", "a TPU cannot"),
        (
            "--config_file config.yaml train.py",
            "distributed_type: FSDP\nnum_nodes: 2\n",
            "unknown keys (['num_nodes'])",
        ),
        ("--config_file config.yaml train.py", "a: [", "accelerate launch: yaml"),
        ("--config_file nowhere.yaml train.py", "", "`nowhere.yaml` does not exist"),
        ("--multi_gpu --use_fsdp train.py", "", "You can only use one of"),
        ("--multi_gpu --num_processes 1 train.py", "", "at least 2 processes"),
    ],
)
def test_what_accelerate_refuses_and_what_cannot_be_rehearsed_is_one_line(words: str, config: str, said: str) -> None:
    Path("config.yaml").write_text(config)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        read(words)
    assert "\n" not in str(error.value)


def test_without_accelerate_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.commands.launch", None)
    with pytest.raises(ValueError, match="install accelerate where torch is"):
        read("train.py")
