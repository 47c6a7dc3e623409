"""The process that trials share, as the fork server sees it, where a trial forks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from fsdp_bench.train.processes.resident import ResidentProcess


def fork_and_die(_command: dict[str, Any]) -> int:
    """The child keeps every pipe of its parent open."""
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.timeout(60)
def test_its_end_is_seen_although_a_process_that_it_forked_lives_on() -> None:
    resident, begin = ResidentProcess(fork_and_die), time.monotonic()
    pid = resident.begin({"trial": ""})
    status = resident.end()
    assert time.monotonic() - begin < 10
    assert os.WTERMSIG(status) == signal.SIGKILL
    resident.close()
    for process in psutil.process_iter():
        if process.pid != os.getpid() and os.getpgid(process.pid) == pid:
            process.kill()
