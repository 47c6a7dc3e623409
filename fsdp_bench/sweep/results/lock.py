"""One process at a time writes to a sweep's folder, on whichever node of a cluster it runs.

``.writer.N``, made with O_EXCL, names the N-th writer of the folder, who writes a sign of life into it every few
seconds. A process that finds the last writer dead creates the next file and deletes the old one. A writer whose file is
gone stops. On one node its process tells whether a writer lives, on another one its signs of life. flock would do
neither on some shared file systems: they have it for each node alone, or not at all (Lustre without ``-o flock``).

Signs of life are contents, not times: the clocks of nodes differ, and NFS shows the contents of a file as they were
when it was last closed, to whoever opens it.
"""

import contextlib
import os
import platform
import threading
import time
from pathlib import Path

import msgspec
import psutil

from fsdp_bench.spec.errors import ResultsError

BEAT_SECONDS = 5.0
DEAD_AFTER_SECONDS = 45.0
"""The time to watch a writer on another node that gives no sign of life before its place is taken."""
_CLOCK_SECONDS = 5.0
"""The start of a process is known to this: when the clock is set, that of all processes moves."""


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a writer's file."""

    node: str
    process: int
    boot: str
    """The boot of the node's kernel."""
    namespace: str = ""
    """The namespace of the process's number, which a container has of its own."""
    started: float = 0.0
    """When the process started, in seconds since the epoch: a later one may have its number."""
    beat: int = 0
    """The number of signs of life so far."""
    has_ended: bool = False


class FolderLock:
    """The right to write to a folder. Locks nothing until ``take``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = LockHolder(
            node=node_name(),
            process=os.getpid(),
            boot=_boot(),
            namespace=_namespace(),
            started=psutil.Process().create_time(),
        )
        self._number = 0
        self._ends = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self) -> None:
        """Become the writer of a folder. Raises ResultsError if there is another, OSError if it cannot be written."""
        while not self._take_next():
            time.sleep(0.1)
        self._ends.clear()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def give_back(self) -> None:
        """Say that this writer has ended. Nothing happens if it is none."""
        if self._beating is not None:
            self._ends.set()
            self._beating.join()
            self._beating = None
        if self._number:
            with contextlib.suppress(OSError):
                self._say(has_ended=True)
            self._number = 0

    @property
    def is_taken(self) -> bool:
        """Whether this process is the writer."""
        return self._number > 0

    def lost(self) -> Path | None:
        """Return the writer's file if it was removed, so that another process may write here; else None."""
        path = self._path(self._number)
        return path if self.is_taken and _read(path) is None else None

    def _path(self, number: int) -> Path:
        return _path(self._folder, number)

    def _take_next(self) -> bool:
        """Become the next writer. Return whether that went well; another process may have become it meanwhile."""
        numbers = _numbers(self._folder)
        last = numbers[-1] if numbers else 0
        while last and not self._is_over(last):
            last += 1  # only if it exists: what was listed may be old
            if _read(self._path(last)) is None:
                return False
        try:
            descriptor = os.open(self._path(last + 1), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(self._writer))
        self._number = last + 1
        for number in numbers:
            self._path(number).unlink(missing_ok=True)
        return True

    def _is_over(self, number: int) -> bool:
        """Return whether a writer has ended or gives no sign of life. False if its file is gone.

        Raises ResultsError if it lives.
        """
        path = self._path(number)
        first = _read(path)
        begin = time.monotonic()
        while True:
            seen = _read(path)
            if seen is None:
                return False
            if seen.has_ended or _lives_here(seen) is False:
                return True
            if seen != first or _lives_here(seen):
                who = f" (process {seen.process} on {seen.node})" if seen.process else ""
                raise ResultsError(f"{self._folder}: another fsdp-bench sweep is writing here{who}; wait for it to end")
            if time.monotonic() - begin > DEAD_AFTER_SECONDS:
                return True
            time.sleep(BEAT_SECONDS / 5)

    def _beat(self) -> None:
        while not self._ends.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # gone: lost() says so; a file system that is away may come back
                self._say(beat=self._writer.beat + 1)

    def _say(self, **fields: object) -> None:
        """Write into this writer's file, if it is still there."""
        self._writer = msgspec.structs.replace(self._writer, **fields)
        descriptor = os.open(self._path(self._number), os.O_WRONLY)
        with os.fdopen(descriptor, "wb") as file:
            data = msgspec.json.encode(self._writer)
            file.write(data)
            file.truncate()


def last_writer(folder: Path) -> LockHolder | None:
    """Return the last writer of a folder, without taking a lock. None if there was none."""
    numbers = _numbers(folder)
    return _read(_path(folder, numbers[-1])) if numbers else None


def seems_to_live(folder: Path, writer: LockHolder) -> bool:
    """Return whether the last writer of a folder seems to write there still; takes no lock.

    On this node its process tells; on another one the time of its last sign of life, as far as clocks agree.
    """
    if writer.has_ended:
        return False
    if (lives := _lives_here(writer)) is not None:
        return lives
    with contextlib.suppress(OSError, IndexError):
        return time.time() - _path(folder, _numbers(folder)[-1]).stat().st_mtime < 2 * DEAD_AFTER_SECONDS
    return False


def _lives_here(writer: LockHolder) -> bool | None:
    """Return whether a writer's process runs on this node; None for one on another node, or in another container."""
    if (writer.node, writer.boot, writer.namespace) != (node_name(), _boot(), _namespace()):
        return None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(writer.process)
        is_same = abs(process.create_time() - writer.started) < _CLOCK_SECONDS
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    return False


def _path(folder: Path, number: int) -> Path:
    return folder / f".writer.{number}"


def _numbers(folder: Path) -> list[int]:
    found = (path.name.rpartition(".")[2] for path in folder.glob(".writer.*"))
    return sorted(int(number) for number in found if number.isdigit())


def _read(path: Path) -> LockHolder | None:
    """Return what a writer's file says, None if it is gone. One that is just being written is of an unknown writer."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=LockHolder)
    except msgspec.DecodeError:
        return LockHolder(node="another node", process=0, boot="")


def node_name() -> str:
    """Return the name of this node, as Slurm or the host has it."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
