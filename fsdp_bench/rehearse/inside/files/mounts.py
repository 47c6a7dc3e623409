"""The file systems that are mounted, and those of them that do not answer."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress

ANSWER_SECONDS = 5.0
"""The time that a file system may take to answer. NFS whose server is gone never does."""

WITHOUT_USERS_FILES = frozenset({
    *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
    *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs"),
    "tracefs",
})  # fmt: skip
"""Types of file systems."""


def mounts() -> Iterator[tuple[str, str]]:
    """Yield each mount point and its file system's type: man 5 proc_pid_mountinfo."""
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            fields, _, file_system = line.partition(b" - ")
            point = fields.split()[4].decode("unicode_escape").encode("latin-1")  # \040 is a blank
            yield os.fsdecode(point), file_system.split()[0].decode()


def silent(places: Sequence[str], seconds: float = ANSWER_SECONDS) -> list[str]:
    """Return the places whose file system does not answer within some seconds.

    Nothing ends a stat(2) that waits for a server, so another process makes it: one for all places, and a new one
    after each that does not answer.
    """
    found: list[str] = []
    begin = 0
    while begin < len(places):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _stat_all(places[begin:], writer)
        os.close(writer)
        while select.select([reader], [], [], seconds)[0] and (answers := os.read(reader, 4096)):
            begin += len(answers)
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        if begin < len(places):
            found.append(places[begin])
            begin += 1
            os.waitpid(child, os.WNOHANG)  # it may be stuck
        else:
            os.waitpid(child, 0)
    return found


def _stat_all(places: Sequence[str], writer: int) -> None:
    """Write a byte after each place that answered, and end this process; nobody waits for what else it had open."""
    try:
        os.dup2(writer, 0)
        os.closerange(1, 4096)
        for place in places:
            with suppress(OSError):  # an answer, too
                os.stat(place)
            os.write(0, b".")
    finally:
        os._exit(0)
