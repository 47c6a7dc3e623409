"""``python -m fsdp_bench.train.processes.torchrun PARENT TRIAL.json SCRATCH OPTIONS``: a trial's ranks under torchrun.

On one machine the rendezvous of torchrun, and that of the ranks, is a file in the scratch folder: a TCPStore would
listen on every interface of the machine, whatever address it is given, without a password. On several nodes it is a
c10d rendezvous on the first one. Then this is started once on every node: by srun, or by the sweep's process on that
node. Nothing here, and nothing in the ranks, knows which of them it was.

torchrun runs this module again for each rank, with the arguments ``rank TRIAL.json SCRATCH``.
"""

import argparse
import os
import socket
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

from fsdp_bench.train.processes.child import PARENT_PID, die_with_parent


def main() -> None:
    """Start this node's ranks; return when they have ended, or raise as torchrun does. Or be one of them."""
    if sys.argv[1] == "rank":
        _run_rank(*map(Path, sys.argv[2:]))
    given = _parse()
    if given.parent:
        die_with_parent(given.parent)

    from torch.distributed.run import main as torchrun

    os.environ[PARENT_PID] = str(os.getpid())  # the ranks end when this process does; torchrun alone lets them run
    torchrun(
        [
            *(_on_this_machine(given) if given.endpoint is None else _on_several_nodes(given)),
            f"--nproc-per-node={given.ranks_per_node}",
            "--rdzv-backend=c10d",
            "--max-restarts=0",
            f"--log-dir={given.scratch}",
            *("-m", "fsdp_bench.train.processes.torchrun", "rank", given.trial, given.scratch),
        ]
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fsdp_bench.train.processes.torchrun")
    parser.add_argument("parent", type=int, help="the process with which this one ends; 0 for none")
    parser.add_argument("trial")
    parser.add_argument("scratch")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--endpoint", help="HOST:PORT of the rendezvous, on the first of several nodes")
    parser.add_argument("--num-nodes", type=int)
    parser.add_argument("--run-id")
    parser.add_argument("--join-seconds", type=int, default=300, help="how long to wait for the other nodes")
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    parser.add_argument("--node-name", default="")
    return parser.parse_args()


def _on_this_machine(given: argparse.Namespace) -> list[str]:
    from fsdp_bench.train.processes.rank import plain_path

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    endpoint = f"{plain_path(Path(given.scratch))}/agent"
    return ["--rdzv-conf=store_type=file", "--local-addr=127.0.0.1", f"--rdzv-endpoint={endpoint}"]


def _on_several_nodes(given: argparse.Namespace) -> list[str]:
    import psutil

    from fsdp_bench.train.processes.rank import NODE, STORE

    address = _own_address(given.endpoint)
    os.environ[STORE] = "env://"
    if given.node_name:
        os.environ[NODE] = given.node_name
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            # gloo takes the address of the host's name otherwise, which often is 127.0.1.1
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return [
        f"--nnodes={given.num_nodes}",
        f"--rdzv-endpoint={given.endpoint}",
        f"--rdzv-id={given.run_id}",
        f"--rdzv-conf=is_host={int(given.node_rank == 0)},join_timeout={given.join_seconds}",
        f"--local-addr={address}",
    ]


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


def _run_rank(trial: Path, scratch: Path) -> NoReturn:
    """Run the rank that torchrun names in RANK and LOCAL_RANK, and end this process."""
    die_with_parent(int(os.environ[PARENT_PID]))  # before torch is imported, which takes seconds

    from fsdp_bench.train.processes.worker import run_rank

    rank, local_rank, num_local = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    os._exit(
        run_rank(trial, rank, local_rank, scratch, "torchrun", num_local)
    )  # no destructors: they would wait for peers that may be gone


if __name__ == "__main__":
    main()
