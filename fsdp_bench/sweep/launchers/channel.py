"""The connections between the nodes of a sweep without Slurm: JSON messages and files, over TCP.

Both sides prove that they have the same key before anything is read (multiprocessing.connection, HMAC). Messages are
JSON, never pickles. A node without power is noticed by TCP's keep-alive.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

import psutil

from fsdp_bench import __version__
from fsdp_bench.spec.errors import MachineError, SpecError, shown

KEY = "FSDP_BENCH_CLUSTER_KEY"
"""The environment variable with a secret that all nodes know, for networks with other users."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A node that is silent for 30 s is lost; as far as the system has these options."""
_HANDSHAKE_SECONDS = 20.0
_RETRY_SECONDS = 0.5
_PART = 1 << 20


def key_of(sweep_file: Path) -> bytes:
    """Return the key of a sweep: of its file's text, this version, and KEY. Without KEY it keeps mistakes out, no more.

    Raises:
        MachineError: if the file cannot be read.
    """
    try:
        text = sweep_file.read_bytes()
    except OSError as error:
        raise MachineError(f"{sweep_file}: {error.strerror}") from None
    parts = (text, __version__.encode(), os.environ.get(KEY, "").encode())
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).digest()


def parse_endpoint(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises:
        SpecError: saying what is allowed.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise SpecError(f"--rdzv-endpoint: {shown(text)} is not allowed; HOST:PORT of the first node, as node0:29420")
    return host.strip("[]"), int(port)


def addresses_of(host: str, port: int) -> list[tuple[Any, Any]]:
    """Return the family and the socket address of each address of a host.

    Raises:
        MachineError: if the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MachineError(f"--rdzv-endpoint: {host} has no address here: {error.strerror or error}") from None
    return [(family, address) for family, _, _, _, address in found]


def listen(host: str, port: int) -> socket.socket | None:
    """Listen at an address of this node. None if the host is another node, or something listens there already."""
    own = {one.address.partition("%")[0] for group in psutil.net_if_addrs().values() for one in group}
    for family, address in addresses_of(host, port):
        is_own_name = address[0].startswith("127.") and address[0] != "127.0.0.1"  # by Debian's /etc/hosts
        if address[0] in own or is_own_name:
            try:
                return socket.create_server(("", port) if is_own_name else address[:2], family=family)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise MachineError(f"--rdzv-endpoint: {host}:{port}: {error.strerror}") from None
    return None


def accept(server: socket.socket, key: bytes, seconds: float) -> Channel | str | None:
    """Return the next node that knows the key; the address of one that does not; None if none comes."""
    server.settimeout(seconds)
    try:
        client, address = server.accept()
    except TimeoutError:
        return None
    channel = Channel(client)
    try:
        channel.prove(key, asks_first=True)
    except (OSError, EOFError, ValueError, AuthenticationError):
        channel.close()
        return str(address[0])
    return channel


def connect(host: str, port: int, key: bytes, seconds: float) -> Channel:
    """Connect to the first node, which may start later.

    Raises:
        MachineError: if it does not within these seconds, or has another key.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            client = socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS)
            break
        except socket.gaierror as error:
            raise MachineError(f"--rdzv-endpoint: {host} has no address here: {error.strerror or error}") from None
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or str(error)
                raise MachineError(
                    f"the first node at {host}:{port} cannot be reached: {why}; is a firewall there?"
                ) from None
            time.sleep(_RETRY_SECONDS)
    channel = Channel(client)
    try:
        channel.prove(key, asks_first=False)
    except (OSError, EOFError, ValueError, AuthenticationError):
        channel.close()
        raise MachineError(
            f"the first node at {host}:{port} runs another sweep file, another version of fsdp-bench, or has another"
            f" {KEY}; all nodes need the same, and no other program at that port"
        ) from None
    return channel


class Channel:
    """A connection to one other node."""

    def __init__(self, client: socket.socket) -> None:
        client.settimeout(None)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.own_address = str(client.getsockname()[0])
        """This node's address as the other one sees it."""
        self.connection = Connection(client.detach())
        self.node = "?"
        """The other node's name, once it has said it."""

    def prove(self, key: bytes, asks_first: bool) -> None:
        """Prove to the other side that this one knows the key, and have it do the same."""
        steps = (deliver_challenge, answer_challenge)
        self._wait_at_most(_HANDSHAKE_SECONDS)
        for step in steps if asks_first else reversed(steps):
            step(self.connection, key)
        self._wait_at_most(0)

    def _wait_at_most(self, seconds: float) -> None:
        """Let reading fail after some seconds; 0 for never."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))

    def send(self, **message: Any) -> None:
        """Send a message.

        Raises:
            OSError: if the connection is gone.
        """
        self.connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            OSError, EOFError: if the connection is gone.
        """
        message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return message

    def send_files(self, paths: Sequence[Path]) -> None:
        """Send files, each under its name.

        Raises:
            OSError: if the connection is gone.
        """
        for path in paths:
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.send(file=path.name, num_bytes=size)
                while size > 0:
                    part = file.read(min(_PART, size)) or b"\0" * min(_PART, size)  # it was cut meanwhile
                    self.connection.send_bytes(part)
                    size -= len(part)

    def receive_file(self, folder: Path, message: dict[str, Any]) -> None:
        """Receive the file that a message announced, into a folder. Its name must be a plain one.

        Raises:
            OSError, EOFError: if the connection is gone, or the file cannot be written.
        """
        left, name = int(message["num_bytes"]), Path(str(message["file"])).name
        partial = folder / f".{name}.partial"
        with open(partial, "wb") as file:
            while left > 0:
                left -= file.write(self.connection.recv_bytes())
        partial.replace(folder / name)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.connection.close()
