"""On which nodes a sweep runs: this one, those of a Slurm job, or those on which the same command was started."""

from __future__ import annotations

from pathlib import Path

from fsdp_bench.spec.errors import MachineError, SpecError
from fsdp_bench.sweep.launchers.channel import key_of, listen, parse_endpoint
from fsdp_bench.sweep.launchers.slurm import SlurmCluster
from fsdp_bench.sweep.launchers.slurm_job import current_job
from fsdp_bench.sweep.launchers.torchrun_nodes import OtherNode, Say, TorchrunCluster
from fsdp_bench.sweep.machine import probe_machine

MOST_NODES = 4096


def choose_nodes(
    sweep_file: Path,
    say: Say,
    *,
    slurm: bool = False,
    rdzv_endpoint: str | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
) -> SlurmCluster | TorchrunCluster | OtherNode | None:
    """Return the nodes of a sweep; None if it runs on this machine alone.

    Args:
        sweep_file: the same on all nodes.
        say: prints a line.
        slurm: use the nodes of the Slurm job that this process runs in.
        rdzv_endpoint: ``HOST:PORT`` of the first node, if the same command is started on each. The first is the node
            with that address; of two processes there, the one that listens first.
        nodes: how many they are, with ``rdzv_endpoint``.
        ranks_per_node: ranks of a trial on each node; by default one for each of its GPUs.

    Raises:
        SpecError: for options that are not allowed together.
        MachineError: if this is no job of Slurm, or the endpoint has no address.
    """
    if slurm and (rdzv_endpoint or nodes):
        raise SpecError("--slurm takes the job's nodes; leave --nodes and --rdzv-endpoint out")
    if bool(rdzv_endpoint) != bool(nodes):
        raise SpecError("--nodes and --rdzv-endpoint go together; in a job of Slurm, use --slurm instead")
    if slurm:
        return SlurmCluster(current_job(), _ranks_per_node(ranks_per_node))
    if rdzv_endpoint is None or nodes is None:
        if ranks_per_node is not None:
            raise SpecError("--ranks-per-node is for several nodes: --slurm, or --nodes and --rdzv-endpoint")
        return None
    (host, port), key = parse_endpoint(rdzv_endpoint), key_of(sweep_file)
    each = _ranks_per_node(ranks_per_node)
    server = listen(host, port)
    return OtherNode(host, port, key, say) if server is None else TorchrunCluster(server, host, nodes, each, key, say)


def _ranks_per_node(given: int | None) -> int:
    num_gpus = len(probe_machine().gpus)
    if given is None and not num_gpus:
        raise MachineError("--ranks-per-node: by default one for each GPU, and this node has none; give a number")
    return given or num_gpus
