"""The fork server: imports torch once, then forks each trial's ranks, so that no trial pays for the import.

Safe because this process never starts CUDA, a thread or a process group: a rank begins as a fresh process would
after ``import torch``. Every trial's ranks are one process group of the operating system, so that its manager can
end all of them, helpers included, at once. When this process dies its ranks die with it, and it dies with its
manager (PR_SET_PDEATHSIG).

Protocol, one JSON object a line. In: ``{"trial": path, "scratch": folder, "world_size": n}``. Out:
``{"event": "ready", "unsafe": reason or null}``, ``{"event": "started", "pgid": n}``,
``{"event": "exited", "rank": r, "status": s}`` with s as waitpid gives it, and ``{"event": "ended"}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from fsdp_bench.train.parent import die_with_parent


def unsafe_to_fork() -> str | None:
    """Return why a fork of this process could not train: CUDA is started, or another thread runs; else None."""
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


def _run_child(command: dict[str, Any], rank: int, pgid: int) -> NoReturn:
    """Become one rank: its own log, its process group, then the worker."""
    from fsdp_bench.spec.codec import from_json
    from fsdp_bench.spec.record import TrialSpec
    from fsdp_bench.train.worker import run_rank

    code = 1
    try:
        os.setpgid(0, pgid)
        scratch = Path(command["scratch"])
        log = os.open(scratch / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        spec = from_json(Path(command["trial"]).read_bytes(), TrialSpec)
        code = run_rank(spec, rank, rank, scratch, f"file://{scratch / 'rendezvous'}")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # no destructors: they would wait for peers that may be gone


def _run_trial(command: dict[str, Any]) -> None:
    """Fork the ranks, report each one's end."""
    server, pgid, ranks = os.getpid(), 0, {}
    for rank in range(command["world_size"]):
        pid = os.fork()
        if pid == 0:
            die_with_parent(server)
            _run_child(command, rank, pgid)
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


def main() -> None:
    """Import what every trial needs, then serve until standard input closes."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the manager's to handle

    import fsdp_bench.train.worker
    import fsdp_bench.train.wrap_ddp
    import fsdp_bench.train.wrap_fsdp1
    import fsdp_bench.train.wrap_fsdp2  # noqa: F401

    _say("ready", unsafe=unsafe_to_fork())
    for line in sys.stdin:
        _run_trial(json.loads(line))


if __name__ == "__main__":
    main()
