"""Runs rehearsed scripts in forks of one process that has imported their packages: ``python fork_server.py torch``.

It is started as a rehearsal is, with the stand-in preloaded. Standard input: one request a line, as JSON: the words
after the interpreter, the environment, the working directory and the file for what is printed. Standard output: the
exit code of each, as ``subprocess.Popen.returncode``. A child is what Python is after those imports: nothing of CUDA
has begun, and no thread.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any

import torch
import torch.utils._triton


def run(request: dict[str, Any]) -> None:
    """Become the process that the request asks for, and end."""
    opened = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(opened, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    script, *_ = sys.argv = request["words"]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        os._exit(1)  # inside/main.py ends its process itself


def main() -> None:
    """Answer standard input."""
    # torchao asks on import whether the GPU can run Triton's kernels, and starts CUDA to know. All that are tested can.
    torch.utils._triton.has_triton = lambda: True
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert not torch.cuda.is_initialized(), "an import started CUDA, which a fork could not use"
    assert len(os.listdir("/proc/self/task")) == 1, "an import started threads, which a fork would not have"
    gc.collect()
    gc.freeze()
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=out, flush=True)


if __name__ == "__main__":
    main()
