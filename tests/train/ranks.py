"""Real ranks for tests: forked from this process, over gloo on the loopback interface, ended by force if they hang."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _rank_main(
    rank: int, world_size: int, rendezvous: Path, pipe: Connection, function: Callable[..., Any], args: Any
) -> None:
    try:
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*deprecated", category=FutureWarning)
        # A unit that is one nn.Linear returns a view; nothing in the models changes it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        pipe.send(("ok", pickle.dumps(function(*args))))
        dist.barrier()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        os._exit(0)  # peers that failed would make destructors wait


def run_ranks(
    world_size: int, rendezvous: Path, function: Callable[..., Any], *args: Any, seconds: float = 240
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new gloo world; return what each rank returned.

    Raises:
        AssertionError: with the rank's traceback, or after ``seconds``; no process outlives the call.
    """
    context = multiprocessing.get_context("fork")
    rendezvous = rendezvous / f"rendezvous-{time.monotonic_ns()}"
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, world_size, rendezvous, theirs, function, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        deadline = time.monotonic() + seconds
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(deadline - time.monotonic(), 0)), f"rank {rank} said nothing in {seconds} s"
            status, value = pipe.recv()
            assert status == "ok", f"rank {rank}: {value}"
            results.append(pickle.loads(value))
        return results
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
