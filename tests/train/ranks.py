"""Real ranks for tests: gloo on the loopback interface, in processes that are ended by force if they hang.

Ranks are forked from multiprocessing's fork server, which has imported torch and never ran any of it. A fork of
pytest's own process would inherit the locks of its threads, and on a machine with a GPU an autograd engine that
refuses to run in a fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LEAVING_SECONDS = 10
"""How long a rank that has answered may take to leave."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "hypothesis", "torch._dynamo", "torch.utils.flop_counter", "fsdp_bench.train.processes.worker"]
)


def _name_the_known_warnings() -> None:
    """Make every warning an error, as in pytest's process, but those that torch gives for what tests do on purpose."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*NO_SHARD.*deprecated", category=FutureWarning)
    # A unit that is one nn.Linear returns a view; nothing in the models changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)


def _rank_main(rank: int, world_size: int, rendezvous: Path, pipe: Connection, call: bytes) -> None:
    try:
        gc.freeze()  # collections need not look through what torch's import left, page after page
        _name_the_known_warnings()
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        function, args = pickle.loads(call)
        # pickle and not the pipe's own pickler, which would hand tensors over in shared memory of a dying process.
        pipe.send_bytes(pickle.dumps((None, function(*args))))
        dist.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc())))
    finally:
        os._exit(0)  # peers that failed would make destructors wait


def run_ranks(
    world_size: int, rendezvous: Path, function: Callable[..., Any], *args: Any, seconds: float = 200
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new gloo world; return what each rank returned.

    Raises:
        AssertionError: with the traceback of the rank that failed first, or after ``seconds``. No rank outlives the
            call.
    """
    rendezvous = rendezvous / f"rendezvous-{time.monotonic_ns()}"
    call = pickle.dumps((function, args))
    rank_of, processes = {}, []
    try:
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank_main, args=(rank, world_size, rendezvous, theirs, call))
            process.start()
            theirs.close()
            rank_of[ours] = rank
            processes.append(process)
        answers = _collect(rank_of, time.monotonic() + seconds)
        for process in processes:
            process.join(timeout=LEAVING_SECONDS)
        return answers
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in rank_of:
            pipe.close()


def _collect(rank_of: dict[Connection, int], deadline: float) -> list[Any]:
    """Return each rank's answer, or raise for the rank that failed first: its peers fail after it, because of it."""
    answers: dict[int, Any] = {}
    while len(answers) < len(rank_of):
        silent = [pipe for pipe, rank in rank_of.items() if rank not in answers]
        ready = wait(silent, timeout=max(deadline - time.monotonic(), 0))
        assert ready, f"ranks {[rank_of[pipe] for pipe in silent]} did not answer in time"
        failures: list[tuple[float, str]] = []
        for pipe in silent:
            if pipe in ready:
                failed_at, value = _receive(pipe)
                answers[rank_of[pipe]] = value
                if failed_at is not None:
                    failures.append((failed_at, f"rank {rank_of[pipe]}: {value}"))
        assert not failures, min(failures)[1]
    return [answers[rank] for rank in sorted(answers)]


def _receive(pipe: Connection) -> tuple[float | None, Any]:
    """Return when the rank failed, if it did, and what it says."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return 0.0, "died without a word"
