"""Chooses the nodes of a sweep: this one, those of a Slurm job, or those on which the same command was started."""

import contextlib
import socket
from pathlib import Path

import psutil

from fsdp_bench.spec.errors import MachineError, ResultsError, SpecError, shown
from fsdp_bench.sweep.launchers.slurm import SlurmNodes, current_job
from fsdp_bench.sweep.launchers.torchrun_nodes import Meeting, Say, TorchrunNodes
from fsdp_bench.sweep.machine import probe_machine

MOST_NODES = 4096
MOST_RANKS_PER_NODE = 4096


def choose_nodes(
    sweep_file: Path,
    results: Path,
    say: Say,
    *,
    slurm: bool = False,
    rdzv_endpoint: str | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> SlurmNodes | TorchrunNodes | Meeting | None:
    """Return the nodes of a sweep; None if it runs on this machine alone; a Meeting if another node is the first.

    Of several nodes on which the same command is started, the first is the one whose address ``rdzv_endpoint``
    (``HOST:PORT``) has; of two processes there, the one that comes first. ``ranks_per_node`` is by default the number
    of a node's GPUs. ``say`` prints a line.

    Raises:
        SpecError: for options that are not allowed together.
        MachineError: if this is no job of Slurm, or the endpoint has no address.
    """
    if slurm and (rdzv_endpoint or nodes):
        raise SpecError("--slurm takes the job's nodes; leave --nodes and --rdzv-endpoint out")
    if bool(rdzv_endpoint) != bool(nodes):
        raise SpecError("--nodes and --rdzv-endpoint go together; in a job of Slurm, use --slurm instead")
    if slurm:
        return SlurmNodes(current_job(), _ranks_per_node(ranks_per_node))
    if rdzv_endpoint is None or nodes is None:
        if ranks_per_node is not None:
            raise SpecError("--ranks-per-node is for several nodes: --slurm, or --nodes and --rdzv-endpoint")
        return None
    is_first, each = _is_here(rdzv_endpoint), _ranks_per_node(ranks_per_node)
    meeting = Meeting(results, rdzv_endpoint, sweep_file, say)
    if is_first:
        with contextlib.suppress(ResultsError):  # another process of this host is the first node
            return TorchrunNodes(meeting, nodes, each)
    return meeting


def _is_here(endpoint: str) -> bool:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise SpecError(
            f"--rdzv-endpoint: {shown(endpoint)} is not allowed; HOST:PORT of the first node, as node0:29420"
        )
    own = {one.address.partition("%")[0] for group in psutil.net_if_addrs().values() for one in group}
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), int(port))]
    except OSError as error:
        raise MachineError(f"--rdzv-endpoint: {host} has no address here: {error.strerror or error}") from None
    return any(address in own or address.startswith("127.") for address in addresses)  # Debian's own name is 127.0.1.1


def _ranks_per_node(given: int | None) -> int:
    num_gpus = len(probe_machine().gpus)
    if given is None and not num_gpus:
        raise MachineError("--ranks-per-node: by default one for each GPU, and this node has none; give a number")
    return given or num_gpus
