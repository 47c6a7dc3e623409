"""``fsdp-bench sweep`` on several nodes: its options, and how a job of Slurm goes on after its time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from fsdp_bench.cli.common.interrupts import ignore, time_is_up, watch_time_limit
from fsdp_bench.cli.common.lists import Count
from fsdp_bench.report.terminal import print_line
from fsdp_bench.spec.errors import ExitCode, MachineError
from fsdp_bench.sweep.launchers.choose import MOST_NODES
from fsdp_bench.sweep.launchers.launcher import NodesLost
from fsdp_bench.sweep.launchers.slurm import SlurmCluster
from fsdp_bench.sweep.session import Session

MOST_RANKS = 4096
MOST_RESTARTS = 20
"""Requeues of a job after which it is not requeued for a lost node again, if no trial has ended in it."""


NODE_OPTIONS = {
    "slurm": click.option("--slurm", is_flag=True, help="Use all nodes of this Slurm job; submit writes its script."),
    "rdzv_endpoint": click.option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Without Slurm: start the same command on --nodes nodes, which share --results; HOST is the first.",
    ),
    "nodes": click.option(
        "--nodes", type=Count(MOST_NODES), metavar="N", help="The number of nodes, with --rdzv-endpoint."
    ),
    "ranks_per_node": click.option(
        "--ranks-per-node",
        type=Count(MOST_RANKS),
        metavar="N",
        help="Ranks of a trial on each of several nodes; by default one for each GPU.",
    ),
}
"""The options that say on which nodes a sweep runs."""


def on_nodes(session: Session[Any], run: Callable[[], int]) -> int:
    """Run a session. In a job of Slurm, go on in a later one where the time limit is near or a node was lost."""
    cluster = session.cluster
    if not isinstance(cluster, SlurmCluster):
        return run()
    watch_time_limit()
    try:
        return run()
    except NodesLost as lost:
        names = ", ".join(lost.nodes)
        if not session.num_new and (len(lost.nodes) == cluster.num_nodes or cluster.job.restarts >= MOST_RESTARTS):
            raise MachineError(
                f"srun starts no process on {names}, and no trial has ended in this job: it is not requeued;"
                f" {lost.why or 'try srun --overlap --nodes=2 hostname in the job'}"
            ) from None
        return _requeue(cluster, f"the job has lost {names}; {session.num_done} of {session.num_total} are done")


def interrupted(session: Session[Any], done: str) -> int:
    """Say how a sweep that was interrupted goes on; put a job whose time limit is near back into the queue.

    ``done`` says how much is recorded.
    """
    if not time_is_up() or not isinstance(session.cluster, SlurmCluster):
        print_line(f"fsdp-bench: interrupted; {done}, the same command resumes", error=True)
        return ExitCode.INTERRUPTED
    if not session.num_new:
        print_line(
            f"fsdp-bench: the job's time limit is near and no trial has ended in it; {done}; submit again with a longer"
            " --time, or set a shorter [run] timeout_seconds",
            error=True,
        )
        return ExitCode.CRASHED
    return _requeue(session.cluster, f"the job's time limit is near; {done}")


def _requeue(cluster: SlurmCluster, why: str) -> int:
    """Put the job back into the queue, which ends this process."""
    ignore()  # Slurm ends the job with SIGTERM
    print_line(f"fsdp-bench: {why}; job {cluster.job.id} goes back into the queue and will go on", error=True)
    try:
        cluster.job.requeue()
    except MachineError as error:
        print_line(f"fsdp-bench: the job cannot be requeued: {error}; submit it again, which resumes", error=True)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE
