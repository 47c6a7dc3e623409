"""The fork server: safe to fork from, and its ranks die with it."""

from __future__ import annotations

import os
import subprocess
import sys

from fsdp_bench.sweep.launchers.processes import worker_environment


def test_after_its_imports_the_server_has_one_thread_and_no_cuda() -> None:
    words = [sys.executable, "-m", "fsdp_bench.train.processes.server", str(os.getpid())]
    done = subprocess.run(words, input="", capture_output=True, text=True, env=worker_environment(), timeout=200)
    assert done.stdout == '{"event": "ready", "unsafe": null}\n', done.stderr


def test_a_second_thread_makes_it_unsafe_and_the_reason_says_so() -> None:
    program = (
        "import threading, time; from fsdp_bench.train.processes.server import unsafe_to_fork\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); print(unsafe_to_fork())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "importing torch started 1 threads\n"
