"""The fork server: imports torch once, then forks each trial's ranks, so that no trial pays for the import.

Forking is safe because this process never starts CUDA, a thread or a process group: a rank begins like a new process
after ``import torch``. The ranks of a trial are one process group of the operating system, so that the sweep can end
all of them and their children at once. When this process dies its ranks die with it, and it dies with the process of
the sweep (PR_SET_PDEATHSIG).

Protocol, one JSON object a line. In: ``{"trial": path, "scratch": folder, "world_size": n}``. Out:
``{"event": "ready", "unsafe": reason or null}``, ``{"event": "started", "pgid": n}``,
``{"event": "exited", "rank": r, "status": s}`` where s is a status of waitpid, and ``{"event": "ended"}``.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdp_bench.train.processes.child import die_with_parent


def unsafe_to_fork() -> str | None:
    """Return why forks of this process could not train: CUDA is started, or another thread runs. None if they can."""
    if sys.platform != "linux":
        return "forking after importing torch is only known to work on Linux"
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("/dev/nvidia"):
                return f"importing torch opened {target}"
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else f"importing torch started {threads - 1} threads"


def _say(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _run_rank(command: dict[str, Any], rank: int) -> int:
    """Run one rank in this process, with its own log; return its exit status."""
    from fsdp_bench.train.processes.worker import run_rank

    scratch = Path(command["scratch"])
    for path, flags, descriptors in (
        (scratch / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, (1, 2)),
        (Path(os.devnull), os.O_RDONLY, (0,)),
    ):
        opened = os.open(path, flags, 0o644)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    return run_rank(Path(command["trial"]), rank, rank, scratch, "fork")


def _run_trial(command: dict[str, Any]) -> None:
    server, pgid, ranks = os.getpid(), 0, {}
    for rank in range(command["world_size"]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(server)
                os.setpgid(0, pgid)
                code = _run_rank(command, rank)
            finally:
                os._exit(code)  # no destructors: they would wait for peers that may be gone
        if rank == 0:
            pgid = pid
        with contextlib.suppress(OSError):
            os.setpgid(pid, pgid)  # both sides set it, so that neither has to wait for the other
        ranks[pid] = rank
    _say("started", pgid=pgid, pids=list(ranks))
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            _say("exited", rank=ranks.pop(pid), status=status)
    _say("ended")


def _import_code(command: dict[str, Any]) -> None:
    """Import Hugging Face's code of a trial's model, for all ranks. If that fails, each rank says why."""
    from fsdp_bench.spec.codec import from_json, to_json
    from fsdp_bench.spec.model_code import ModelCode
    from fsdp_bench.spec.record import TrialSpec

    spec = from_json(Path(command["trial"]).read_bytes(), TrialSpec)
    if not isinstance(spec.model, ModelCode) or spec.model.config is None:
        return
    config = to_json(spec.model.config)
    if spec.device == "cuda" and _initializes_cuda(config):
        return  # each rank imports it
    _import_and_build(config)
    gc.freeze()


def _import_and_build(config: bytes) -> None:
    from fsdp_bench.train.models.huggingface import import_code

    with contextlib.suppress(Exception):
        import_code(json.loads(config))


@lru_cache
def _initializes_cuda(config: bytes) -> bool:
    """Return whether importing a model's code initializes CUDA, after which a process's children cannot use it.

    transformers imports torchao where it is installed, and torchao asks what the GPU can do. A child tries it.
    """
    pid = os.fork()
    if pid == 0:
        import torch

        _import_and_build(config)
        os._exit(torch.cuda.is_initialized())
    return os.waitpid(pid, 0)[1] != 0


def main() -> None:
    """Import what every trial needs, then run trials until standard input closes."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the manager's to handle

    import fsdp_bench.train.processes.worker  # noqa: F401

    importlib.import_module("torch._dynamo")  # fully_shard's first forward does, in every rank
    gc.freeze()  # ranks' collections need not look through what the imports left, nor copy its pages
    _say("ready", unsafe=unsafe_to_fork())
    for line in sys.stdin:
        command = json.loads(line)
        _import_code(command)
        _run_trial(command)


if __name__ == "__main__":
    main()
