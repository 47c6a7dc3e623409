"""The script that a command would start as one rank, whatever its launcher."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from .launch import (
    Launch,
    LaunchedRank,
    python_program,
    understand_torch_distributed_launch,
    understand_torchrun,
)


def understand(launcher: str, words: Sequence[str], rank: int, world_size: int, gpus_per_node: int) -> Launch:
    """Return what a launcher followed by these words would start as this rank.

    Args:
        launcher: A value of ``fsdp_bench.rehearse.command.Launcher``.
        words: The words that follow the launcher.
        rank: The rank that replaces all of the launcher's processes.
        world_size: The ranks of the world that is asked for, whatever the launcher's arguments say.
        gpus_per_node: The GPUs of a node of that world.

    Raises:
        ValueError: The launcher refuses its arguments, or starts what cannot be rehearsed. One line.
    """
    one = LaunchedRank(rank, world_size, gpus_per_node)
    if launcher == "torchrun":
        return understand_torchrun(words, one)
    if launcher == "torch.distributed.launch":
        return understand_torch_distributed_launch(words, one)
    if launcher == "accelerate":
        from .accelerate_launch import understand_accelerate

        return understand_accelerate(words, one)
    if launcher != "none":
        raise ValueError(f"launcher: {launcher!r} is not known; one of none, torchrun, accelerate")
    kind, target, arguments = python_program(words, "python")
    said = shlex.join(["python", *words[: len(words) - len(arguments)]])
    return Launch(kind, target, arguments, f"{said}: run as {one}")
