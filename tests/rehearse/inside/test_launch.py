"""A launcher's arguments, read by its own parser, give one rank what the launcher would have given it."""

import ast
import re
import sys
from pathlib import Path

import pytest

from fsdp_bench.rehearse.inside.launch import Launch, rank_environment, understand
from tests.rehearse.inside.conftest import assert_given, given_by

FOLDER = Path(__file__).parents[3] / "fsdp_bench" / "rehearse" / "inside"


def read(line: str, rank: int = 0, world_size: int = 64, gpus_per_node: int = 8) -> Launch:
    launcher, *words = line.split()
    return understand(launcher, words, rank, world_size, gpus_per_node)


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("none train.py --x -m y", ("script", "train.py", ["--x", "-m", "y"])),
        ("none -m pkg.train --x", ("module", "pkg.train", ["--x"])),
        ("none -c pass 1", ("code", "pass", ["1"])),
        ("torchrun --standalone --nproc-per-node gpu train.py --nnodes 3", ("script", "train.py", ["--nnodes", "3"])),
        ("torchrun --nproc_per_node=auto -m pkg.train --x", ("module", "pkg.train", ["--x"])),
        ("torchrun --module pkg.train", ("module", "pkg.train", [])),
        ("torchrun --no-python python -u -m pkg --x", ("module", "pkg", ["--x"])),
        ("torchrun --no-python /usr/bin/python3.12 train.py", ("script", "train.py", [])),
        ("torchrun train.py --device ${local_rank}", ("script", "train.py", ["--device", "3"])),
        ("torch.distributed.launch train.py --x", ("script", "train.py", ["--local-rank=3", "--x"])),
        ("torch.distributed.launch --use-env train.py --x", ("script", "train.py", ["--x"])),
    ],
)
def test_the_program_is_what_the_launcher_would_start(line: str, program: tuple[str, str, list[str]]) -> None:
    launch = read(line, rank=11)
    assert (launch.kind, launch.target, launch.arguments) == program


@pytest.mark.parametrize(
    ("line", "num_processes", "per_node"),
    [
        ("torchrun train.py", 1, 1),
        ("torchrun --nproc-per-node 8 train.py", 8, 8),
        ("torchrun --nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr far.away train.py", 16, 8),
        ("torchrun --nnodes 2:2 --nproc-per-node 4 train.py", 8, 4),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 --rdzv-backend c10d train.py", None, 8),
        ("torchrun --nnodes 2 --nproc-per-node gpu train.py", None, None),
        ("torch.distributed.launch --nproc_per_node=4 train.py", 4, 4),
        ("none train.py", None, None),
    ],
)
def test_the_world_that_the_arguments_say_is_told(line: str, num_processes: int | None, per_node: int | None) -> None:
    launch = read(line)
    assert (launch.num_processes, launch.processes_per_node) == (num_processes, per_node)


def test_torchruns_variables_say_what_its_arguments_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_NNODES", "3")
    assert read("torchrun train.py").num_processes == 12


@pytest.mark.parametrize(
    ("line", "world_size", "sentence"),
    [
        (
            "torchrun --nnodes 2 --nproc-per-node 8 train.py --x",
            64,
            "torchrun --nnodes 2 --nproc-per-node 8 train.py: replaced by rank 0 of 64, 8 a node",
        ),
        ("torchrun train.py", 8, "torchrun train.py: replaced by rank 0 of 8 on one node"),
        (
            "torch.distributed.launch train.py",
            8,
            "python -m torch.distributed.launch train.py: replaced by rank 0 of 8 on one node",
        ),
        ("none -m pkg --x", 64, "python -m pkg: run as rank 0 of 64, 8 a node"),
    ],
)
def test_one_line_says_what_was_replaced(line: str, world_size: int, sentence: str) -> None:
    assert read(line, world_size=world_size).sentence == sentence


@pytest.mark.parametrize("words", ["--nproc-per-node 1", "--nproc-per-node 2 --role trainer --max-restarts 3"])
def test_a_rank_is_given_what_torchrun_gives(words: str) -> None:
    """Expected: the environment of a worker that torchrun itself started."""
    given = given_by("torch.distributed.run", *words.split(), "train.py")
    world_size = int(given["WORLD_SIZE"])
    launch = read(f"torchrun {words} train.py", world_size=world_size, gpus_per_node=8)
    ours = {**rank_environment(0, world_size, 8), **launch.environment}
    assert launch.gives_ranks
    assert_given(ours, given)


def test_threads_that_the_user_chose_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert read("torchrun --nproc-per-node 8 train.py").environment["OMP_NUM_THREADS"] == "12"


def test_the_run_is_named_as_the_user_named_it() -> None:
    assert read("torchrun --rdzv-id 77 train.py").environment["TORCHELASTIC_RUN_ID"] == "77"


def test_a_virtual_local_rank_sees_its_own_gpu_alone() -> None:
    environment = read("torchrun --virtual-local-rank train.py", rank=11).environment
    assert (environment["LOCAL_RANK"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", "3")


def test_python_alone_gives_no_ranks() -> None:
    launch = read("none train.py")
    assert (launch.gives_ranks, launch.environment) == (False, {})


@pytest.mark.parametrize(
    ("rank", "world_size", "local_rank", "local_world_size", "node", "nodes"),
    [
        (0, 1, 0, 1, 0, 1),
        (0, 64, 0, 8, 0, 8),
        (63, 64, 7, 8, 7, 8),
        (9, 10, 1, 2, 1, 2),  # the last node has two ranks
        (3, 4, 3, 4, 0, 1),
    ],
)
def test_ranks_fill_one_node_after_another(
    rank: int, world_size: int, local_rank: int, local_world_size: int, node: int, nodes: int
) -> None:
    environment = rank_environment(rank, world_size, 8)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK")
    expected = (rank, world_size, local_rank, local_world_size, node, nodes, node)
    assert [environment[name] for name in names] == [str(number) for number in expected]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun", "the following arguments are required: training_script"),
        ("torchrun --no-such-option train.py", "torchrun: "),
        ("torchrun nowhere.py", "the script nowhere.py is not in"),
        ("torchrun --nproc-per-node many train.py", "many is not a number, nor one of gpu, auto"),
        ("torchrun --nnodes two train.py", "two is not a number, nor MIN:MAX"),
        ("torchrun --no-python ./run.sh", "--no-python ./run.sh cannot be rehearsed"),
        ("torchrun --no-python python", "expected a script"),
        ("torchrun --no-python -m train.py", "exclude each other"),
        ("none -m", "-m needs a value"),
        ("none nowhere.py", "the script nowhere.py is not in"),
        ("slurm train.py", "'slurm' is not known"),
    ],
)
def test_what_a_launcher_refuses_is_one_line(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        read(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.name)
def test_a_file_for_the_users_interpreter_is_python_3_10_without_our_dependencies(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    roots = {str(name).split(".")[0] for name in imported}
    of_scripts = {"accelerate", "transformers", "safetensors", "tokenizers", "huggingface_hub", "PIL"}
    assert roots <= {*sys.stdlib_module_names, "torch", *of_scripts}
