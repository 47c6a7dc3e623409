"""The command that ``accelerate launch`` would start, and the environment it would give: read by accelerate's own code.

``accelerate.commands.launch.launch_command`` decides among launchers by the GPUs of the machine it runs on. Here the
world that is asked for decides, because that machine may have none.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from .launch import Launch, LaunchedRank, parsed, rank_environment, replaced, started_program, torchrun_environment

NAME = "accelerate launch"
ALLOWED = "FSDP, DDP and a single GPU can be rehearsed: --use_fsdp or --multi_gpu, or distributed_type of the config"


def understand_accelerate(words: Sequence[str], one: LaunchedRank) -> Launch:
    """Return what ``accelerate launch`` followed by these words would start as this rank.

    Raises:
        ValueError: accelerate is not installed, refuses its arguments or its config file, or starts what cannot be
            rehearsed. One line.
    """
    try:
        import accelerate.commands.launch as accelerate_launch
    except ModuleNotFoundError as error:
        raise ValueError(f"{NAME}: {error}; install accelerate where torch is") from error
    args = parsed(accelerate_launch.launch_command_parser(), words, NAME)
    kind, target, arguments = started_program(args, NAME)
    asked_multi_gpu = args.multi_gpu
    args, config = _validated(accelerate_launch, args, one)
    _refuse_other_hardware(args, config)
    args.multi_gpu = one.world_size > 1 or (args.multi_gpu if config else asked_multi_gpu)
    num_processes = args.said_processes
    per_node = num_processes // max(args.num_machines or 1, 1) if num_processes else None
    gives_ranks = bool(args.use_fsdp or args.multi_gpu)
    environment = _environment(accelerate_launch, args, one, gives_ranks)
    note = f", with {accelerate_launch.default_config_file}" if config and not args.config_file else ""
    sentence = replaced(NAME, words, args, one, note)
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
            raise ValueError(f"{NAME}: {mode} cannot be rehearsed; {ALLOWED}")


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
    return {**torchrun_environment(args, one), **changed} if gives_ranks else changed


def _refused(error: Exception) -> ValueError:
    return ValueError(f"{NAME}: " + " ".join("".join(traceback.format_exception_only(error)).split()))
