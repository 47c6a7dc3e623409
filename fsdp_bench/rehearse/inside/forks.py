"""Runs programs in forks of this process, which has loaded torch: ``python main.py --forks DESCRIPTOR SCRATCH``.

fsdp_bench/rehearse/prepared.py asks through a socket. Until it forks, this process has only imported modules: CUDA is
not initialized, and there are no other threads. A fork has file overlays and settings of the stand-in of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .files import overlay, places
from .files.protection import Protection

END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""

MOST_BYTES = 1 << 16
"""The size of a request or an answer."""

STAND_IN_NAMES = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1")
"""Names by which the driver and NVML are loaded: links to the stand-in. Triton links against ``libcuda.so``."""


def serve(descriptor: int, scratch: Path) -> None:
    """Answer requests, each a JSON object, until the other side closes the socket.

    ``modules``: a file with the names of modules to import, and their files. ``program``: a program to run in a fork,
    with descriptors of its standard input, output and errors. ``wait``: the number of a fork that has ended.
    """
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    Protection(scratch, ())
    entered = json.loads((scratch / places.ENTERED).read_text())
    connection = socket.socket(fileno=descriptor)
    from .observe import issued, steps  # noqa: F401 - what every rehearsal imports, torch first
    from .replace import checkpoints, host_memory, process_group  # noqa: F401

    answer: dict[str, Any] = {"error": _why_not_forked()}
    while True:
        connection.sendall(json.dumps(answer).encode())
        text, descriptors, *_ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not text:
            os._exit(0)
        request = json.loads(text)
        if "modules" in request:
            answer = {"error": _import(json.loads(Path(request["modules"]).read_text()))}
        elif "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            host_memory.loaded_file_bytes = host_memory.resident_file_bytes()
            answer = _fork(connection, request, descriptors, entered)


def _fork(
    connection: socket.socket, request: Mapping[str, Any], descriptors: list[int], entered: Mapping[str, Any]
) -> dict[str, Any]:
    """Fork; return the fork's number once its files are protected, or the error."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        connection.close()
        os.close(reader)
        _become(request, descriptors, entered, writer)
    for one in (writer, *descriptors):
        os.close(one)
    with open(reader) as said:
        error = said.read()
    if error:
        os.waitpid(pid, 0)
    return {"error": error} if error else {"pid": pid}


def _become(request: Mapping[str, Any], descriptors: list[int], entered: Mapping[str, Any], writer: int) -> None:
    """Run a program in this fork. What it prints goes to the given descriptors."""
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
        for standard, given in enumerate(descriptors):
            os.dup2(given, standard)
            os.close(given)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=stream is sys.stderr or os.isatty(1))  # type: ignore[union-attr]
        for name, value in request["variables"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        ctypes.CDLL(None).stand_in_read_settings()
        os.chdir(request["folder"])
        if request["scratch"] is not None and (error := _protect(request["folder"], Path(request["scratch"]), entered)):
            os.write(writer, error.encode())
            os._exit(1)
        os.close(writer)
        _seed_anew()
        importlib.invalidate_caches()
        sys.argv = list(request["program"])
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # the program ends its process itself


def _protect(folder: str, scratch: Path, entered: Mapping[str, Any]) -> str | None:
    """Give this fork overlays of its own; return why it can have none though the process that forks it has some.

    Where no process can, Python's functions protect files (files/protection.py).
    """
    if "error" in entered:
        (scratch / places.ENTERED).write_text(json.dumps(entered))
        return None
    overlay.leave(entered["outside"])
    for one in (*entered["outside"], *(lower for _upper, lower in entered["overlays"])):
        os.close(one)
    os.chdir(folder)
    before = _descriptors()
    said = overlay.enter(scratch, has_own_user=entered["has_own_user"])
    for one in _descriptors() - before - {lower for _upper, lower in said.get("overlays", ())}:
        os.close(one)
    return f"no overlay in a fork: {said['error']}" if "error" in said else None


def _seed_anew() -> None:
    """Seed random numbers as a new process does; Python's own random does that in each fork."""
    import torch

    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _descriptors() -> set[int]:
    return {int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")}


def _import(files: Mapping[str, str]) -> str | None:
    """Import modules; return why this process cannot be forked any more, or None.

    A module of another file than the given one, and one that is not given, is what the script would not have.
    """
    with _without_starting_cuda():
        for name in files:
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"{name} cannot be imported by itself: {error!r}"
    import torch

    for name, module in [*sys.modules.items()]:
        if files.get(name) and getattr(module, "__file__", None) != files[name]:
            return f"{name} would be another module"
    return "an import started CUDA" if torch.cuda.is_initialized() else _why_not_forked()


def _why_not_forked() -> str | None:
    """Return why a fork would not be like a new process, or None; let names find the libraries that are loaded.

    A fork has overlays of its own, in which the dynamic linker does not recognize the file of a loaded library. It
    compares names first.
    """
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)  # OpenBLAS, which numpy loads, ends its threads before a fork
    if len(os.listdir("/proc/self/task")) > 1:
        return "an import started threads"
    with open("/proc/self/maps") as lines:
        mapped = {line.rstrip("\n").partition("/")[2] for line in lines}
    libraries = [f"/{path}" for path in mapped if ".so" in os.path.basename(path)]
    for name in (*STAND_IN_NAMES, *libraries):
        try:
            ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:  # a library that is loaded in another namespace, or not at all
            continue
    return None


@contextmanager
def _without_starting_cuda() -> Iterator[None]:
    """Answer the questions of imports about the GPU, for which torch would start CUDA."""
    from unittest import mock

    import torch.utils._triton

    is_importing, has_triton = True, torch.utils._triton.has_triton
    capability = divmod(int(os.environ["STAND_IN_CAPABILITY"]), 10)
    torch.utils._triton.has_triton = lambda: is_importing or has_triton()  # modules keep it; true from 7.0 on
    try:
        with mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: int(os.environ["STAND_IN_DEVICES"]),
            get_device_capability=lambda _device=None: capability,
        ):
            yield
    finally:
        is_importing = False
