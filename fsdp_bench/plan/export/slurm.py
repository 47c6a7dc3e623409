"""train.sbatch: a job for Slurm that starts one of the other exported files on every node."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_bench.plan.export import accelerate, huggingface, pytorch, torchtitan
from fsdp_bench.plan.export.chosen import Chosen
from fsdp_bench.plan.export.files import SEGMENTS, File, header

KIND = "slurm"
NAME = "train.sbatch"

# One task a node starts all of its ranks: without --cpu-bind=none they would share the CPU of one task.
_TORCHRUN = """\
srun --cpu-bind=none torchrun \\
    --nnodes "$SLURM_JOB_NUM_NODES" \\
    --nproc-per-node {each} \\
    --rdzv-backend c10d \\
    --rdzv-endpoint "$HEAD_NODE:$PORT" \\
    --rdzv-id "$SLURM_JOB_ID" \\
    {what}
"""
_ACCELERATE = """\
srun --cpu-bind=none bash -c 'accelerate launch \\
    --config_file {config} \\
    --machine_rank "$SLURM_NODEID" \\
    --main_process_ip "$HEAD_NODE" \\
    --main_process_port "$PORT" \\
    {what}'
"""
_STARTS = {
    pytorch.KIND: pytorch.NAME,
    huggingface.KIND: huggingface.NAME,
    torchtitan.KIND: "-m torchtitan.train --module torchtitan_config --config chosen_setting",
    accelerate.KIND: accelerate.NAME,
}
"""The file that is started, by kind; the first kind that is exported beside."""


def started_kind(kinds: Sequence[str]) -> str:
    """Return the kind whose file the job starts."""
    return next((one for one in _STARTS if one in kinds), pytorch.KIND)


def job(chosen: Chosen, kinds: Sequence[str], notes: tuple[str, ...]) -> list[File]:
    """Return the job, which starts the first of the other kinds, or train_fsdp.py where there is none.

    ``notes`` are those of what it starts.

    Raises:
        SpecError: if it is not known how the GPUs are spread over servers.
    """
    kind = started_kind(kinds)
    if kind not in kinds:
        notes = (*notes, f"the job starts {pytorch.NAME}, which --export pytorch writes")
    comment = header(f"Slurm job that starts {_STARTS[kind]}", chosen, notes)
    text = f"""#!/bin/bash
{comment}
#SBATCH --job-name=fsdp
#SBATCH --nodes={chosen.num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={chosen.gpus_per_node}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.out

set -euo pipefail
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=29500
{_segments(chosen)}cd "$SLURM_SUBMIT_DIR"

{_start(chosen, kind)}"""
    return [File(KIND, NAME, text, f"sbatch {NAME}", notes)]


def _segments(chosen: Chosen) -> str:
    return f"export {SEGMENTS}\n" if chosen.question.expandable_segments else ""


def _start(chosen: Chosen, kind: str) -> str:
    if kind == accelerate.KIND:
        return _ACCELERATE.format(config=accelerate.CONFIG_NAME, what=_STARTS[kind])
    return _TORCHRUN.format(each=chosen.gpus_per_node, what=_STARTS[kind])
