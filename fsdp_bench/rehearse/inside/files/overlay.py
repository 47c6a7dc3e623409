"""Overlays of Linux over all folders, in a mount namespace that only this process and its children see.

The script's changes go to a scratch folder and are read back from there. Temporary folders stay as they are, but for
the script's folder and the working directory, which may be in one.

Not covered: devices and /run, and file systems that do not answer: as root these are empty for the script. In a user
namespace a file of another user or group cannot be changed; and there are no overlays at all (OSError) where the user
may write into a folder below which something is mounted.

Needs a kernel that lets this process mount overlays: as root, or in a user namespace of its own (Linux 5.11 and newer,
where neither a container nor the distribution forbids it).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from errno import EINVAL, EOVERFLOW, EXDEV
from pathlib import Path
from typing import Any

from .places import ENTERED, Changes, is_below, named_by, num_files, protected_folders, temporary_folders

_NEW_MOUNTS, _NEW_USER = 0x20000, 0x10000000
"""CLONE_NEWNS and CLONE_NEWUSER of unshare(2)."""
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
"""MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC and MS_PRIVATE of mount(2)."""

_NOT_COVERED = frozenset({"/proc", "/sys", "/dev", "/run", "/lost+found"})


def enter(scratch: Path, keeps_outside: bool = False, has_own_user: bool = False) -> dict[str, Any]:
    """Mount overlays for the plan in a scratch folder; return, and say in a file there, how that went.

    Must be called while the process has one thread. ``keeps_outside``: forks of this process, and of the program that
    it executes, can ``leave`` the overlays for their own. ``has_own_user``: this process has left them so.
    """
    said: dict[str, Any]
    try:
        folders = protected_folders(named_by(json.loads((scratch / "plan.json").read_text())))
        overlay = Overlay(str(scratch), folders, keeps_outside, has_own_user)
        said = {"overlays": overlay.layers, "read_only": overlay.read_only, "silent": overlay.silent}
        said |= {"outside": overlay.outside, "has_own_user": overlay.has_own_user, "protected": folders}
    except OSError as error:
        said = {"error": error.strerror}
    (scratch / ENTERED).write_text(json.dumps(said))
    if said.get("has_own_user"):
        _keep_capabilities(keeps_outside)
    return said


def leave(outside: Sequence[int]) -> None:
    """Let this process see files as they are without overlays, by the descriptors ``outside`` of ``enter``."""
    namespace, root = outside
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "setns")
    os.fchdir(root)
    os.chroot(".")


def _keep_capabilities(is_wanted: bool) -> None:
    """Let programs that are executed have this process's capabilities, or give them up (man 7 capabilities)."""
    libc = ctypes.CDLL(None)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)()
    if is_wanted:
        libc.capget(header, sets)
        sets[2], sets[5] = sets[1], sets[4]  # inheritable, as permitted
        libc.capset(header, sets)
        for number in range(64):  # those that there are
            libc.prctl(_AMBIENT, _RAISE, number, 0, 0)
    elif os.getuid():
        libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        libc.capset(header, sets)


_CAPABILITIES_3, _AMBIENT, _RAISE, _CLEAR_ALL = 0x20080522, 47, 2, 4
"""_LINUX_CAPABILITY_VERSION_3; PR_CAP_AMBIENT of prctl(2), and what it does."""

Layers = tuple[str, int]
"""An overlay's folder with the script's changes, and the descriptor of the covered folder, which exec() keeps."""


class Overlay:
    """The overlays of this process."""

    def __init__(
        self, scratch: str, folders: Sequence[str], keeps_outside: bool = False, has_own_user: bool = False
    ) -> None:
        """Mount them, and one over each of ``folders``, which are real paths and may be in a temporary folder.

        Must be called while the process has one thread. The script's changes go below ``scratch``. ``has_own_user``:
        the process is in a user namespace of its own.

        Raises OSError: The kernel does not allow it.
        """
        self._scratch, self._folders = os.path.realpath(scratch), folders
        self._own = f"layers-{os.getpid()}"  # if a fork cannot have overlays, another process tries it
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.layers: list[Layers] = []
        self.read_only: list[str] = []
        """Folders whose file system can have no overlay."""
        temporary = temporary_folders()
        self.has_own_user = has_own_user or self._libc.unshare(_NEW_MOUNTS) != 0
        """Whether the process needs a user namespace for a mount namespace of its own."""
        self._unshare(folders, is_new_user=self.has_own_user and not has_own_user)
        self.outside = [os.open(place, os.O_RDONLY) for place in ("/proc/self/ns/mnt", "/")] if keeps_outside else []
        """Descriptors of the mount namespace without overlays and of its root."""
        if keeps_outside:
            self._check(self._libc.unshare(_NEW_MOUNTS), "unshare")
        self._mounts = dict(mounts())
        """The file system's type by mount point, as they are without overlays."""
        self.silent = silent([*self._mounts])
        """Mount points that have no overlay because their file system does not answer, as NFS without its server."""
        places = {*temporary, self._scratch, *folders, *self._mounts} - {*self.silent}
        self._below = {place: os.open(place, os.O_PATH) for place in places if os.path.isdir(place)}
        """Descriptors of folders as they are without overlays."""
        working = os.getcwd()
        try:
            for place in _folders_in("/"):
                if place not in temporary:
                    self._cover(place)
            self._show(temporary)
            for named in folders:
                self._cover(named)
        finally:
            self._show([self._scratch])
            os.chdir(working)  # as it is now, and not as it is below the overlay
        self._cover_root()
        os.chdir(working)

    def _unshare(self, folders: Sequence[str], is_new_user: bool) -> None:
        """Give a process with a user namespace a mount namespace of its own, and let no mount leave that."""
        if self.has_own_user:
            user, group = os.getuid(), os.getgid()
            if any(_has_other_owners(folder, user, group) for folder in folders):
                raise OSError(EOVERFLOW, "files of other users or groups")
            self._check(self._libc.unshare(_NEW_MOUNTS | (_NEW_USER if is_new_user else 0)), "unshare")
            for file, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                if is_new_user:
                    with open(f"/proc/self/{file}", "w") as mapping:
                        mapping.write(text)
        self._mount("none", "/", None, _RECURSIVE | _PRIVATE)

    def _cover(self, place: str) -> None:
        """Mount an overlay over a folder and over each file system that is mounted below it."""
        if place in _NOT_COVERED or place in self.silent or self._mounts.get(place) in WITHOUT_USERS_FILES:
            return
        inner = [mount for mount in self._mounts if mount != place and is_below(mount, place)]
        mounted = sorted(mount for mount in inner if mount in self._below)
        # The kernel keeps a user namespace from what is below its mounts.
        if self.has_own_user and (mounted or {*inner} & {*self.silent}):
            self._require_not_writable(place)
            with suppress(PermissionError):
                for folder in _folders_in(place):
                    self._cover(folder)
            return
        self._overlay(place, self._below[place] if place in self._below else os.open(place, os.O_PATH))
        self._show([mount for mount in mounted if self._mounts[mount] in WITHOUT_USERS_FILES])
        for mount in mounted:
            if self._mounts[mount] not in WITHOUT_USERS_FILES:
                self._overlay(mount, self._below[mount])

    def _cover_root(self) -> None:
        """Make an overlay of the root the root, with everything that is mounted in it: root may write there."""
        if self.has_own_user:
            self._require_not_writable("/")
            return
        root, folders = f"{self._scratch}/{self._own}/root", _folders_in("/")
        os.mkdir(root)
        self._overlay("/", os.open("/", os.O_PATH), root)
        for folder in folders:
            if folder not in self.silent:
                self._mount(folder, root + folder, None, _BIND | _RECURSIVE)
        os.chroot(root)

    def _require_not_writable(self, place: str) -> None:
        if os.access(place, os.W_OK):
            raise OSError(EINVAL, f"something is mounted below {place}, which may be written")

    def _overlay(self, place: str, lower: int, target: str | None = None) -> None:
        """Mount an overlay of a folder over it, or over ``target``.

        A file system that cannot have one becomes read-only, unless the script's folder or working directory is in it.
        """
        for in_memory in (False, True):
            scratch = f"/proc/self/fd/{self._below[self._scratch]}"  # an overlay may hide its path
            name = f"{len(self.layers) + len(self.read_only)}-{int(in_memory)}"
            layer = f"{scratch}/{self._own}/{name}"
            os.makedirs(layer)
            try:
                if in_memory:  # an overlay's own file system, and NFS, cannot hold what is written
                    self._mount("tmpfs", layer, "tmpfs", _NO_SUID | _NO_DEVICES)
                for part in ("upper", "work"):
                    os.mkdir(f"{layer}/{part}")
                os.chmod(f"{layer}/upper", stat.S_IMODE(os.stat(place).st_mode))
                upper, work = (os.open(f"{layer}/{part}", os.O_PATH) for part in ("upper", "work"))
                layers = (("lowerdir", lower), ("upperdir", upper), ("workdir", work))
                options = [f"{name}=/proc/self/fd/{number}" for name, number in layers]
                options += ["userxattr"] if self.has_own_user else []
                self._mount("overlay", target or place, "overlay", 0, ",".join(options))
            except OSError:
                continue
            os.set_inheritable(lower, True)
            self.layers.append((f"{self._scratch}/{self._own}/{name}/upper", lower))
            return
        if any(is_below(folder, place) for folder in self._folders):
            raise OSError(EINVAL, "a file system that cannot have one")
        self.read_only.append(place)
        self._mount(place, place, None, _BIND | _RECURSIVE)
        self._mount("none", place, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)

    def _show(self, places: Sequence[str]) -> None:
        """Mount folders as they are where an overlay hides them."""
        for place in places:
            if not os.path.samestat(os.stat(place), os.fstat(self._below[place])):
                self._mount(f"/proc/self/fd/{self._below[place]}", place, None, _BIND | _RECURSIVE)

    def _mount(self, source: str, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
        words = (os.fsencode(word) if word is not None else None for word in (source, place, kind))
        first, second, third = words
        self._check(self._libc.mount(first, second, third, ctypes.c_ulong(flags), options and options.encode()), place)

    def _check(self, result: int, what: str) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)


def changes(overlays: Sequence[Layers]) -> Changes:
    """Count the files that overlays hide from the disk, without Python's caches."""
    written = removed = 0
    for upper, lower in overlays:
        for folder, _, files in os.walk(upper):
            for path in (f"{folder}/{name}" for name in files):
                status = os.lstat(path)
                if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # a whiteout
                    removed += num_files(f"/proc/self/fd/{lower}/{os.path.relpath(path, upper)}")
                elif os.path.basename(folder) != "__pycache__":
                    written += 1
    return written, removed


def _folders_in(place: str) -> list[str]:
    with os.scandir(place) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def _has_other_owners(folder: str, user: int, group: int) -> bool:
    """Whether something in a folder belongs to others, so that a user namespace of this user cannot change it."""
    with os.scandir(folder) as entries:
        owners = [entry.stat(follow_symlinks=False) for entry in entries]
    return any((one.st_uid, one.st_gid) != (user, group) for one in owners)


def rename_folders_by_copying() -> None:
    """Let os.rename move a folder of the disk, which an overlay refuses as a move to another file system."""

    def by_copying(rename: Callable[..., None]) -> Callable[..., None]:
        def instead(source: Any, target: Any, **descriptors: Any) -> None:
            try:
                rename(source, target, **descriptors)
            except OSError as error:
                if error.errno != EXDEV or descriptors or not os.path.isdir(source):
                    raise
                shutil.copytree(source, target, symlinks=True)
                shutil.rmtree(source)

        return instead

    os.rename, os.replace = by_copying(os.rename), by_copying(os.replace)


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
