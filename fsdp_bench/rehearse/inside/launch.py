"""The command that torchrun or accelerate would start, and the environment that it would give to one rank.

The launchers' own parsers read the arguments, as installed with the user's torch and accelerate. Their processes and
rendezvous are replaced by one rank of the world that is asked for. accelerate chooses a launcher by the GPUs of its
machine; here the world that is asked for decides, because the machine may have none.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

ACCELERATE = "accelerate launch"
ACCELERATE_CAN = (
    "FSDP, DDP and a single GPU can be rehearsed: --use_fsdp or --multi_gpu, or distributed_type of the config"
)
PYTHON = re.compile(r"python(\d+(\.\d+)?t?)?")
ANY_NUMBER_PER_NODE = ("gpu", "auto", "cpu", "xpu")
"""The words that torchrun's --nproc-per-node takes beside a number; it then counts the machine's devices."""


@dataclass(frozen=True)
class LaunchedRank:
    """The rank to run, and its world."""

    rank: int
    world_size: int
    gpus_per_node: int

    @property
    def node(self) -> int:
        """The node that this rank is on."""
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        """The rank among those of its node."""
        return self.rank % self.gpus_per_node

    @property
    def local_world_size(self) -> int:
        """The ranks of this rank's node; the last node of a world may have fewer."""
        return min(self.gpus_per_node, self.world_size - self.node * self.gpus_per_node)

    def __str__(self) -> str:
        if self.world_size <= self.gpus_per_node:
            return f"rank {self.rank} of {self.world_size} on one node"
        return f"rank {self.rank} of {self.world_size}, {self.gpus_per_node} a node"


@dataclass
class Launch:
    """The program that a launcher would start in each process."""

    kind: str
    """``script``, ``module`` or ``code``: what ``target`` is."""
    target: str
    arguments: list[str]
    sentence: str
    """One line for the user: what was read, and the rank that replaces it."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables that the launcher would set beside ``rank_environment``, and over it."""
    gives_ranks: bool = False
    """Whether the launcher sets RANK and its like: not python, nor accelerate launch for a single process."""
    num_processes: int | None = None
    """The world size that the launcher's arguments or its config file say; None where they leave it open."""
    processes_per_node: int | None = None


def rank_environment(rank: int, world_size: int, gpus_per_node: int) -> dict[str, str]:
    """Return the variables of torchrun's ``LocalElasticAgent._start_workers`` for a rank, and Lightning's NODE_RANK."""
    one = LaunchedRank(rank, world_size, gpus_per_node)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": one.local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": one.local_world_size,
        "GROUP_RANK": one.node,
        "GROUP_WORLD_SIZE": -(-world_size // gpus_per_node),
        "NODE_RANK": one.node,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # torchrun's own store is not there to be joined
    }


def _understand_torch(words: Sequence[str], one: LaunchedRank, is_torchrun: bool) -> Launch:
    """Return what torchrun starts, or torch.distributed.launch, which also gives the local rank as an argument."""
    from torch.distributed.run import get_args_parser

    name, parser = "torchrun" if is_torchrun else "python -m torch.distributed.launch", get_args_parser()
    if not is_torchrun:
        parser.add_argument("--use-env", "--use_env", default=False, action="store_true")
    args = _parsed(parser, words, name)
    kind, target, arguments = _started_program(args, name)
    # torchrun puts each process's local rank where its arguments say ${local_rank} (elastic/utils/api.py, macros).
    arguments = [word.replace("${local_rank}", str(one.local_rank)) for word in arguments]
    if not is_torchrun and not args.use_env:
        arguments.insert(0, f"--local-rank={one.local_rank}")
    environment = _torchrun_environment(args, one)
    if getattr(args, "virtual_local_rank", False):
        environment.update(LOCAL_RANK="0", CUDA_VISIBLE_DEVICES=str(one.local_rank))
    return Launch(kind, target, arguments, _sentence(name, words, args, one), environment, True, *_world_of(args, name))


def _world_of(args: argparse.Namespace, name: str) -> tuple[int | None, int | None]:
    """Return the processes, and those of one node, where torchrun's arguments say them."""
    nodes = set(args.nnodes.split(":"))  # MIN:MAX; as many as there are
    if not all(number.isdecimal() for number in nodes):
        raise ValueError(f"{name}: --nnodes {args.nnodes} is not a number, nor MIN:MAX")
    if args.nproc_per_node in ANY_NUMBER_PER_NODE:
        return None, None
    if not args.nproc_per_node.isdecimal():
        allowed = ", ".join(ANY_NUMBER_PER_NODE)
        raise ValueError(f"{name}: --nproc-per-node {args.nproc_per_node} is not a number, nor one of {allowed}")
    per_node = int(args.nproc_per_node)
    return (int(nodes.pop()) * per_node if len(nodes) == 1 else None), per_node


def _torchrun_environment(args: argparse.Namespace, one: LaunchedRank) -> dict[str, str]:
    """Return what torchrun sets for each process beside its rank (``run.config_from_args``, ``_start_workers``)."""
    environment = {
        "ROLE_NAME": getattr(args, "role", "default"),
        "TORCHELASTIC_MAX_RESTARTS": str(getattr(args, "max_restarts", 0)),
        "TORCHELASTIC_RUN_ID": getattr(args, "rdzv_id", "none"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if one.local_world_size > 1:
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return environment


def _sentence(name: str, words: Sequence[str], args: argparse.Namespace, one: LaunchedRank, note: str = "") -> str:
    """Return the line that names the launcher, its arguments and its script, without the script's own arguments."""
    said = shlex.join(words[: len(words) - len(args.training_script_args)])
    return f"{name} {said}{note}: replaced by {one}"


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str], name: str) -> argparse.Namespace:
    """Return what a launcher's parser reads. It raises ValueError where it would print its usage and exit."""

    def refuse(message: str) -> None:
        raise ValueError(f"{name}: {message}")

    parser.error = refuse
    return parser.parse_args(list(words))


def _started_program(args: argparse.Namespace, name: str) -> tuple[str, str, list[str]]:
    """Return kind, target and arguments of what a launcher starts; torchrun and accelerate name them alike."""
    target, arguments = args.training_script, list(args.training_script_args)
    if args.module and args.no_python:
        raise ValueError(f"{name}: --module and --no-python exclude each other")
    if args.module:
        return "module", target, arguments
    if not args.no_python:
        return _python_program([target, *arguments], name)
    if not PYTHON.fullmatch(os.path.basename(target)):
        raise ValueError(f"{name}: --no-python {target} cannot be rehearsed; only python SCRIPT, python -m and -c can")
    while arguments[:1] == ["-u"]:
        del arguments[0]
    return _python_program(arguments, name)


def _python_program(words: Sequence[str], name: str) -> tuple[str, str, list[str]]:
    """Return kind, target and arguments of ``-m MODULE``, ``-c CODE`` or a script that exists."""
    if words and words[0] in ("-m", "-c"):
        if len(words) < 2:
            raise ValueError(f"{name}: {words[0]} needs a value after it")
        return ("module" if words[0] == "-m" else "code"), words[1], list(words[2:])
    if not words or words[0].startswith("-"):
        raise ValueError(f"{name}: expected a script, -m MODULE or -c CODE, not {shlex.join(words[:1]) or 'nothing'}")
    if not os.path.exists(words[0]):
        raise ValueError(f"{name}: the script {words[0]} is not in {os.getcwd()}")
    return "script", words[0], list(words[1:])


def _understand_accelerate(words: Sequence[str], one: LaunchedRank, strategy: str | None) -> Launch:
    try:
        import accelerate.commands.launch as accelerate_launch
    except ModuleNotFoundError as error:
        raise ValueError(f"{ACCELERATE}: {error}; install accelerate where torch is") from error
    args = _parsed(accelerate_launch.launch_command_parser(), words, ACCELERATE)
    kind, target, arguments = _started_program(args, ACCELERATE)
    asked_multi_gpu = args.multi_gpu
    args, config = _validated(accelerate_launch, args, one)
    _refuse_other_hardware(args, config)
    if strategy is not None:
        _choose_strategy(args, one, strategy)
    args.multi_gpu = one.world_size > 1 or (args.multi_gpu if config else asked_multi_gpu)
    num_processes = args.said_processes
    per_node = num_processes // max(args.num_machines or 1, 1) if num_processes else None
    gives_ranks = bool(args.use_fsdp or args.multi_gpu)
    environment = _environment(accelerate_launch, args, one, gives_ranks)
    note = f", with {accelerate_launch.default_config_file}" if config and not args.config_file else ""
    sentence = _sentence(ACCELERATE, words, args, one, note)
    return Launch(kind, target, arguments, sentence, environment, gives_ranks, num_processes, per_node)


def _validated(
    accelerate_launch: ModuleType, args: argparse.Namespace, one: LaunchedRank
) -> tuple[argparse.Namespace, Any]:
    """Return the arguments with those of the config file, and the config or None; ``said_processes`` is added.

    accelerate finds no GPU while it reads: CUDA would else start in the script's process, before the script.
    """
    has_config = bool(args.config_file) or (os.path.isfile(accelerate_launch.default_config_file) and not args.cpu)
    is_open = args.num_processes is None and not has_config
    if is_open:
        args.num_processes = one.world_size
    try:
        with mock.patch.multiple("torch.cuda", is_available=lambda: False, device_count=lambda: 0):
            args, config, _ = accelerate_launch._validate_launch_command(args)
    except Exception as error:
        raise _refused(error) from error
    args.said_processes = None if is_open else args.num_processes
    return args, config


def _choose_strategy(args: argparse.Namespace, one: LaunchedRank, strategy: str) -> None:
    """Set accelerate's own switches of the sharding strategy, as its command line would.

    FSDP2 has no sharding strategies (``FullyShardedDataParallelPlugin.__post_init__`` in accelerate/utils): the
    parameters are resharded after forward or not, on a mesh that also replicates in hybrid sharding. DDP has no shards.
    """
    if not args.use_fsdp:
        raise ValueError(f"{ACCELERATE}: --strategy {strategy}, but FSDP is not chosen: --use_fsdp, or in the config")
    is_hybrid = "HYBRID" in strategy
    if int(args.fsdp_version or 1) == 1:
        args.fsdp_sharding_strategy = strategy.lstrip("_")
    elif strategy == "NO_SHARD":
        args.use_fsdp = False
        args.multi_gpu = True
    elif is_hybrid and one.world_size <= one.gpus_per_node:
        raise ValueError(f"{ACCELERATE}: {strategy} under FSDP2 needs several nodes: --nodes 2")
    else:
        args.fsdp_reshard_after_forward = str(strategy in ("FULL_SHARD", "HYBRID_SHARD")).lower()
        if is_hybrid:
            args.use_parallelism_config = True
            args.parallelism_config_dp_replicate_size = one.world_size // one.gpus_per_node
            args.parallelism_config_dp_shard_size = one.gpus_per_node


def _refuse_other_hardware(args: argparse.Namespace, config: Any) -> None:
    """Raise the error for what accelerate would start with other libraries than PyTorch's, or without GPUs."""
    is_amazon = config is not None and config.compute_environment != "LOCAL_MACHINE"
    is_multi_cpu = config is not None and config.distributed_type == "MULTI_CPU"
    modes = {
        "DeepSpeed": args.use_deepspeed,
        "Megatron-LM": args.use_megatron_lm,
        "a TPU": args.tpu or args.tpu_use_cluster,
        "MPI": args.mpirun_hostfile is not None,
        "Amazon SageMaker": is_amazon,
        "training on CPUs": args.cpu or getattr(args, "use_cpu", False) or is_multi_cpu,
    }
    for mode, is_chosen in modes.items():
        if is_chosen:
            raise ValueError(f"{ACCELERATE}: {mode} cannot be rehearsed; {ACCELERATE_CAN}")


def _environment(
    accelerate_launch: ModuleType, args: argparse.Namespace, one: LaunchedRank, gives_ranks: bool
) -> dict[str, str]:
    """Return the variables that accelerate, and torchrun below it, set for each process."""
    # The world that is asked for, on all GPUs. Port 0 is free: accelerate refuses one that is in use.
    args.num_processes, args.num_machines, args.main_process_port, args.gpu_ids = one.world_size, 1, 0, "all"
    try:
        if gives_ranks:
            environment = accelerate_launch.prepare_multi_gpu_env(args)
        else:
            _, environment = accelerate_launch.prepare_simple_launcher_cmd_env(args)
    except Exception as error:
        raise _refused(error) from error
    of_ranks = rank_environment(one.rank, one.world_size, one.gpus_per_node)
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    changed = {name: value for name, value in changed.items() if name not in of_ranks}
    return {**_torchrun_environment(args, one), **changed} if gives_ranks else changed


def _refused(error: Exception) -> ValueError:
    return ValueError(f"{ACCELERATE}: " + " ".join("".join(traceback.format_exception_only(error)).split()))


def understand(
    launcher: str, words: Sequence[str], rank: int, world_size: int, gpus_per_node: int, strategy: str | None = None
) -> Launch:
    """Return what a launcher followed by these words would start as this rank.

    ``launcher`` is a value of ``fsdp_bench.rehearse.command.RankStarter``; ``rank`` replaces all of the launcher's
    processes; the world has ``world_size`` ranks, whatever the launcher's arguments say. ``strategy`` is the name of a
    sharding strategy that accelerate is to choose; None for what its arguments say.

    Raises ValueError: The launcher refuses its arguments, or starts what cannot be rehearsed. One line.
    """
    one = LaunchedRank(rank, world_size, gpus_per_node)
    if launcher in ("torchrun", "torch.distributed.launch"):
        return _understand_torch(words, one, is_torchrun=launcher == "torchrun")
    if launcher == "accelerate":
        return _understand_accelerate(words, one, strategy)
    if launcher != "none":
        raise ValueError(f"launcher: {launcher!r} is not known; one of none, torchrun, accelerate")
    kind, target, arguments = _python_program(words, "python")
    said = shlex.join(["python", *words[: len(words) - len(arguments)]])
    return Launch(kind, target, arguments, f"{said}: run as {one}")
