"""Processes that have loaded torch and are forked for each rehearsal, so that imports are paid for once.

    with PreparedPython() as prepared:
        with RunningRehearsal(command, gpu, rank, options, prepared=prepared) as running: ...

The first rehearsal of a script pays for its imports. Before the second one, the process that is forked imports the
modules of Python and of installed packages that the first one has imported (inside/observe/imports.py), never the
user's own files. There is a process for each script, interpreter and environment. Where one cannot be forked, because
an import starts threads, say, a rehearsal has a new process.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_bench.rehearse.inside.forks import MOST_BYTES

INSIDE = Path(__file__).parent / "inside" / "main.py"
"""The script that runs in the user's Python."""

ENTER = Path(__file__).parent / "enter.py"
"""The program that runs before that, in our own Python."""

IMPORTED = "imported.json"
"""A rehearsal's file with the modules that its script has imported."""

MOST_PROCESSES = 4
"""Processes that are kept; each holds torch and the imports of its script."""


class PreparedPython:
    """The processes, which end with ``with`` and, on Linux, with the thread that has started them."""

    def __init__(self, modules: Sequence[str] | None = None) -> None:
        """``modules`` are imported by each process; by default what its script has imported."""
        self._own = tempfile.TemporaryDirectory(prefix="fsdp-bench-")
        self.folder = Path(self._own.name)
        self._modules = modules
        self._servers: dict[tuple[object, ...], ForkServer] = {}
        """The one that was used last is the last one."""

    def __enter__(self) -> "PreparedPython":
        return self

    def __exit__(self, *_error: object) -> None:
        for server in self._servers.values():
            server.end()
        self._own.cleanup()

    def server(self, python: Sequence[str], script: object, environment: Mapping[str, str]) -> "ForkServer | None":
        """Return a process to be forked for a script; None if that needs a new process.

        ``python`` is the interpreter with its options. ``script`` is anything that tells scripts apart.
        """
        read = sorted((name, value) for name, value in environment.items() if self.is_read_by_imports(name))
        key = (*python, script if self._modules is None else None, *read)
        if key not in self._servers:
            self._end_unused()
        server = self._servers.pop(key, None) or ForkServer(self.folder, python, environment, self._modules)
        if not server.import_modules():
            server.end()
            server = ForkServer(self.folder, python, environment, ())
        self._servers[key] = server
        return None if server.error else server

    def is_read_by_imports(self, variable: str) -> bool:
        """Whether a variable of the environment must be the same: any but those that the stand-in reads in each fork.

        By the compute capability it has chosen kernels when torch was loaded.
        """
        return not variable.startswith("STAND_IN_") or variable == "STAND_IN_CAPABILITY"

    def _end_unused(self) -> None:
        unused = [key for key, server in self._servers.items() if not server.num_running]
        for key in unused[: max(0, len(self._servers) - MOST_PROCESSES + 1)]:
            self._servers.pop(key).end()


class ForkServer:
    """A process that has loaded torch."""

    def __init__(
        self, folder: Path, python: Sequence[str], environment: Mapping[str, str], modules: Sequence[str] | None
    ) -> None:
        """Start it, and wait until torch is loaded. ``modules`` are imported, too; None: those that are learned."""
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        """The folder for its forks' scratch folders."""
        self._environment = environment
        self.num_running = 0
        """The number of forks that have not been ended."""
        self.learns = modules is None
        """Whether it is to be told the modules of the first rehearsal."""
        self._modules: Mapping[str, str] | None = dict.fromkeys(modules, "") if modules else None
        (plan := self.folder / "plan.json").write_text(json.dumps({"words": [], "edited": {}}))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-I", "-S", str(ENTER), str(plan), *python]
        words += [str(INSIDE), "--forks", str(theirs.fileno()), str(self.folder)]
        with theirs:
            self._popen = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )
        self.error: str | None = self._answer()["error"]
        """Why it cannot be forked."""

    def learn(self, imported: Path) -> None:
        """Take over the modules and their files that a rehearsal has imported, to be imported before the next one."""
        if self.learns and imported.exists():
            self._modules, self.learns = json.loads(imported.read_text()), False

    def import_modules(self) -> bool:
        """Import what was learned; return whether the process can still be forked."""
        modules, self._modules = self._modules, None
        if not modules or self.error:
            return True
        (path := self.folder / IMPORTED).write_text(json.dumps(modules))
        return self._ask({"modules": str(path)})["error"] is None

    def fork(
        self, program: Sequence[str], environment: Mapping[str, str], scratch: Path | None, descriptors: Sequence[int]
    ) -> int | None:
        """Run a Python program, which ends its process itself; return the number of its process.

        None if its files cannot be protected in a fork. ``scratch`` has its plan; without it, files are those of this
        process. ``descriptors`` are its standard input, output and errors.
        """
        known = self._environment
        variables: dict[str, str | None] = {
            name: value for name, value in environment.items() if known.get(name) != value
        }
        variables |= dict.fromkeys(known.keys() - environment.keys())
        request = {"program": list(program), "variables": variables, "folder": os.getcwd()}
        answer = self._ask({**request, "scratch": None if scratch is None else str(scratch)}, descriptors)
        self.error = answer.get("error")
        self.num_running += self.error is None
        return answer.get("pid")

    def wait(self, number: int) -> int:
        """Return the exit code of a fork that has ended, as ``subprocess.Popen.returncode``."""
        self.num_running -= 1
        return int(self._ask({"wait": number}).get("code", -signal.SIGKILL))  # it ends with this process

    def end(self) -> None:
        """Kill it, and its forks with it."""
        self._socket.close()
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def _ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # how it ended is said below
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        with suppress(ConnectionResetError):
            if text := self._socket.recv(MOST_BYTES):
                return dict(json.loads(text))
        return {"error": "the process has ended"}
