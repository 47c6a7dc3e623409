"""Runs Python scripts in forks of one process that has imported their packages: ``python fork_server.py MODULE ...``.

The process is started like a rehearsal, with the stand-in preloaded. Standard input has one JSON request a line: the
words after the interpreter, the environment, the working directory, and the files for standard input, output and
errors. Standard output has the exit code of each, as ``subprocess.Popen.returncode``. A fork has only done the imports:
CUDA is not initialized, and there are no other threads. The stand-in reads its settings anew in each fork, except the
compute capability, by which it chose kernels when torch was loaded.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.utils._triton


def run(request: dict[str, Any]) -> None:
    """Become the process that the request describes, and end."""
    os.dup2(os.open(request["input"], os.O_RDONLY), 0)
    for descriptor, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    ctypes.CDLL(None).stand_in_read_settings()
    script, *_ = sys.argv = request["words"]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the script ends its process itself


@contextmanager
def without_starting_cuda() -> Iterator[None]:
    """Answer the questions of torchao's and bitsandbytes' imports about the GPU, for which torch would start CUDA."""
    capability = divmod(int(os.environ["STAND_IN_CAPABILITY"]), 10)
    asked = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count", "get_device_capability")}
    answers = (lambda: True), (lambda: 1), (lambda _device=None: capability)
    for name, answer in zip(asked, answers, strict=True):
        setattr(torch.cuda, name, answer)
    torch.utils._triton.has_triton = lambda: True  # not undone: modules keep it, and it is true from 7.0 on
    try:
        yield
    finally:
        for name, own in asked.items():
            setattr(torch.cuda, name, own)


def main() -> None:
    """Import the modules that the arguments name, and answer requests."""
    with without_starting_cuda():
        for name in sys.argv[1:]:
            with suppress(ImportError):  # another interpreter than the tests' own may have torch alone
                importlib.import_module(name)
    assert not torch.cuda.is_initialized(), "an import started CUDA, which a fork could not use"
    assert len(os.listdir("/proc/self/task")) == 1, "an import started threads, which a fork would not have"
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
