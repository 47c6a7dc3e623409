"""``python -m fsdp_bench.train.processes.node PARENT TRIAL.json SCRATCH OPTIONS``: the ranks on one of several nodes.

Runs torchrun with a c10d rendezvous on the first node. Started once on every node: by srun, or by the sweep's process
on that node. Nothing here, and nothing in the ranks, knows which of them it was.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress

import psutil
from torch.distributed.run import main as torchrun

from fsdp_bench.train.processes.child import PARENT_PID, die_with_parent
from fsdp_bench.train.processes.rendezvous import NODE, STORE


def main(arguments: Sequence[str] | None = None) -> None:
    """Start this node's ranks; return when they have ended, or raise as torchrun does."""
    given = _parse(arguments)
    if given.parent:
        die_with_parent(given.parent)
    address = _own_address(given.endpoint)
    _set_environment(given.node_name, address)
    torchrun(
        [
            f"--nnodes={given.num_nodes}",
            f"--nproc-per-node={given.ranks_per_node}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={given.endpoint}",
            f"--rdzv-id={given.run_id}",
            f"--rdzv-conf=is_host={int(given.node_rank == 0)},join_timeout={given.join_seconds}",
            f"--local-addr={address}",
            "--max-restarts=0",
            f"--log-dir={given.scratch}",
            *("-m", "fsdp_bench.train.processes.torchrun_rank", given.trial, given.scratch),
        ]
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fsdp_bench.train.processes.node")
    parser.add_argument("parent", type=int, help="the process with which this one ends; 0 for none")
    parser.add_argument("trial")
    parser.add_argument("scratch")
    parser.add_argument("--endpoint", required=True, help="HOST:PORT of the rendezvous, on the first node")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--join-seconds", type=int, default=300, help="how long to wait for the other nodes")
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--node-name", default="")
    return parser.parse_args(arguments)


def _set_environment(node_name: str, address: str) -> None:
    os.environ[PARENT_PID] = str(os.getpid())  # the ranks end when this process does
    os.environ[STORE] = "env://"
    if node_name:
        os.environ[NODE] = node_name
    interface = _interface_of(address)
    if interface:  # gloo takes the address of the host's name otherwise, which often is 127.0.1.1
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _own_address(endpoint: str) -> str:
    """Return this node's address in the network of the first node.

    On Debian a node's own name has the address 127.0.1.1; then it is the one in the network of the default route.
    """
    host, _, port = endpoint.rpartition(":")
    address = _address_towards(host.strip("[]"), int(port))
    if address.startswith("127.") and not host.startswith(("127.", "localhost")):
        with suppress(OSError):
            return _address_towards("192.0.2.1", int(port))  # TEST-NET-1 of RFC 5737
    return address


def _address_towards(host: str, port: int) -> str:
    """Return this node's address in the network of a host. Connecting a UDP socket sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(one.address.partition("%")[0] == address for one in addresses)
        ),
        None,
    )


if __name__ == "__main__":
    main()
