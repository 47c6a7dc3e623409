"""Real gloo ranks on the loopback interface, in processes that are killed if they hang.

Ranks are forked from multiprocessing's fork server, which has imported torch and run none of it. A fork of pytest's own
process would inherit the locks of its threads and, on a machine with a GPU, an autograd engine that refuses to run in
forks.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "torch._dynamo",
        "torch.utils.flop_counter",
        "torch.utils._sympy.reference",
        "fsdp_bench.train.processes.worker",
    ]
)


def _turn_warnings_into_errors() -> None:
    """Turn warnings into errors, as in pytest's process, except those about what tests do on purpose."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*NO_SHARD.*deprecated", category=FutureWarning)
    # A unit that is one nn.Linear returns a view; nothing in the models changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)


def _join(rank: int, world_size: int, rendezvous: Path) -> None:
    gc.freeze()  # torch's modules: collections would touch, and so copy, their pages
    _turn_warnings_into_errors()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)


def _answer(call: bytes) -> bytes:
    """Call; pickle the answer here: the pool's pickler would hand tensors over in shared memory of a dying process."""
    function, args = pickle.loads(call)
    answer = pickle.dumps(function(*args))
    dist.barrier()
    return answer


class Ranks:
    """The ranks of a new gloo world, each a pool of one process, which answer calls until ``end``."""

    def __init__(self, world_size: int, folder: Path) -> None:
        rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
        self.has_ended = False
        self._pools = [
            ProcessPoolExecutor(1, FORK_SERVER, _join, (rank, world_size, rendezvous)) for rank in range(world_size)
        ]

    def call(self, function: Callable[..., Any], *args: Any, seconds: float = 200) -> list[Any]:
        """Call ``function(*args)`` on every rank; return what each rank returned.

        Raises:
            AssertionError: with the traceback of the rank that failed first, because of which its peers would hang, or
                after ``seconds``. All ranks have ended then.
        """
        futures = [pool.submit(_answer, pickle.dumps((function, args))) for pool in self._pools]
        done, silent = wait(futures, seconds, FIRST_EXCEPTION)
        errors = {rank: future.exception() for rank, future in enumerate(futures) if future in done}
        failed = [f"rank {rank}: {''.join(traceback.format_exception(one))}" for rank, one in errors.items() if one]
        if failed or silent:
            self.end()
        assert not failed, failed[0]
        assert not silent, (
            f"ranks {[rank for rank in range(len(futures)) if rank not in errors]} did not answer in time"
        )
        return [pickle.loads(future.result()) for future in futures]

    def end(self) -> None:
        """Kill all ranks."""
        self.has_ended = True
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()


def run_ranks(
    world_size: int, folder: Path, function: Callable[..., Any], *args: Any, seconds: float = 200
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new gloo world, as ``Ranks.call`` does, and end the ranks."""
    ranks = Ranks(world_size, folder)
    try:
        return ranks.call(function, *args, seconds=seconds)
    finally:
        ranks.end()


_STANDING: dict[int, Ranks] = {}


def call_standing_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank of a world that stays for all tests of this process.

    The first training in a process takes longer than most cases of a test: torch imports more, and DTensor derives its
    sharding rules. The function must not leave state that another one sees.
    """
    if world_size not in _STANDING or _STANDING[world_size].has_ended:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder)
        _STANDING[world_size] = Ranks(world_size, folder)
    return _STANDING[world_size].call(function, *args)
