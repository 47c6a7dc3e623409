"""Real gloo ranks on the loopback interface, in processes that are killed if they hang.

Ranks are forked from multiprocessing's fork server, which has imported torch and run none of it. A fork of pytest's own
process would inherit the locks of its threads and, on a machine with a GPU, an autograd engine that refuses to run in
forks.
"""

from __future__ import annotations

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
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LEAVING_SECONDS = 10
"""The time limit for ranks to exit after their last answer."""

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


def _rank_main(rank: int, world_size: int, rendezvous: Path, pipe: Connection) -> None:
    """Answer calls until the other end of the pipe is closed, or one fails."""
    try:
        gc.freeze()  # torch's modules: collections would touch, and so copy, their pages
        _turn_warnings_into_errors()
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        while (call := _next_call(pipe)) is not None:
            function, args = pickle.loads(call)
            # pickle and not the pipe's own pickler, which would hand tensors over in shared memory of a dying process.
            pipe.send_bytes(pickle.dumps((None, function(*args))))
            dist.barrier()
    except BaseException:
        pipe.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc())))
    finally:
        os._exit(0)  # peers that failed would make destructors wait


def _next_call(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None


class Ranks:
    """The ranks of a new gloo world, which answer calls until ``end``."""

    def __init__(self, world_size: int, folder: Path) -> None:
        rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
        self._rank_of: dict[Connection, int] = {}
        self._processes = []
        for rank in range(world_size):
            ours, theirs = FORK_SERVER.Pipe()
            process = FORK_SERVER.Process(target=_rank_main, args=(rank, world_size, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._rank_of[ours] = rank
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any, seconds: float = 200) -> list[Any]:
        """Call ``function(*args)`` on every rank; return what each rank returned.

        Raises:
            AssertionError: with the traceback of the rank that failed first, or after ``seconds``. All ranks have
                ended then.
        """
        call = pickle.dumps((function, args))
        try:
            for pipe in self._rank_of:
                with suppress(BrokenPipeError):  # what a rank that has left said is read below
                    pipe.send_bytes(call)
            return _collect(self._rank_of, time.monotonic() + seconds)
        except BaseException:
            self.end(seconds=0)
            raise

    def end(self, seconds: float = LEAVING_SECONDS) -> None:
        """End all ranks: they leave within ``seconds``, or are killed."""
        for pipe in self._rank_of:
            pipe.close()
        for process in self._processes:
            process.join(timeout=seconds)
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self._rank_of, self._processes = {}, []

    @property
    def has_ended(self) -> bool:
        return not self._processes


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


def _collect(rank_of: dict[Connection, int], deadline: float) -> list[Any]:
    """Return each rank's answer, or raise for the rank that failed first, because of which its peers fail."""
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
    except (EOFError, ConnectionResetError):
        return 0.0, "died without a word"
