"""``fsdp-bench submit FILE``: a sweep as a job of Slurm."""

from pathlib import Path
from typing import Any

import click

from fsdp_bench.cli.common.lists import Count
from fsdp_bench.report.terminal import print_line
from fsdp_bench.sweep.launchers.choose import MOST_NODES, MOST_RANKS_PER_NODE
from fsdp_bench.sweep.start import RETRYABLE
from fsdp_bench.sweep.submit import Submission, prepare, submit


@click.command("submit")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--nodes", type=Count(MOST_NODES), required=True, metavar="N", help="Nodes of the job.")
@click.option(
    "--gpus-per-node", type=Count(MOST_RANKS_PER_NODE), metavar="N", help="GPUs of each node, and ranks there."
)
@click.option(
    "--ranks-per-node",
    type=Count(MOST_RANKS_PER_NODE),
    metavar="N",
    help="Ranks on each node, if not one for each GPU.",
)
@click.option("--time", required=True, metavar="LIMIT", help="The job's time limit: minutes, or 2:00:00, or 1-12.")
@click.option("--partition", metavar="NAME", help="Slurm's partition.")
@click.option("--account", metavar="NAME", help="The account that pays.")
@click.option("--qos", metavar="NAME", help="Slurm's quality of service.")
@click.option("--shared", is_flag=True, help="Do not ask for whole nodes; give CPUs and memory with --sbatch then.")
@click.option("--before", multiple=True, metavar="LINE", help="A line of shell before the sweep: 'module load cuda'.")
@click.option("--sbatch", multiple=True, metavar="OPTION", help="Another option of sbatch: --constraint=h100.")
@click.option(
    "--results", default="results", show_default=True, type=click.Path(path_type=Path), help="Results folder."
)
@click.option("--machine", metavar="NAME", help="The machine's folder there; by default NODESxGPUS-PARTITION.")
@click.option("--only", multiple=True, metavar="ID|FIELD=VALUE", help="As of sweep: run only matching trials.")
@click.option("--retry", multiple=True, type=click.Choice(RETRYABLE), help="As of sweep, in the job's first run.")
@click.option("--print", "only_print", is_flag=True, help="Write the script and print it; submit nothing.")
def command(shared: bool, only_print: bool, **options: Any) -> None:
    """Run a sweep FILE as a job of Slurm on several nodes.

    Writes a batch script beside the results and submits it. Before the job's time limit the running trial is ended, and
    the job goes back into the queue; it goes on where it was until all trials are recorded.

    \b
    fsdp-bench submit sweeps/gpu.toml --nodes 2 --gpus-per-node 4 --time 15
    fsdp-bench status results/2x4-slurm/gpu
    """
    prepared = prepare(Submission(exclusive=not shared, **options))
    if only_print:
        for line in prepared.script.read_text().splitlines():
            print_line(line)
        print_line(f"fsdp-bench: written, not submitted: {prepared.script}", error=True)
        return
    job_id = submit(prepared)
    trials = "" if prepared.num_trials is None else f" of {prepared.num_trials} trials"
    print_line(f"job {job_id}{trials} is submitted; results in {prepared.folder}")
    print_line(f"how far it is: fsdp-bench status {prepared.folder}")
