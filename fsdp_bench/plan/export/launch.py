"""The commands that start exported files, and what goes with them."""

from __future__ import annotations

from fsdp_bench.plan.export.chosen import Chosen

SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def environment(chosen: Chosen) -> tuple[str, ...]:
    """Return notes about environment variables that the prediction is for."""
    if not chosen.question.expandable_segments:
        return ()
    return (f"the prediction is for expandable segments, an environment variable: {SEGMENTS}",)


def prefix(chosen: Chosen) -> str:
    """Return the environment variables before a command."""
    return f"{SEGMENTS} " if chosen.question.expandable_segments else ""


def torchrun(chosen: Chosen, what: str) -> str:
    """Return the command that starts all ranks of a node; on several nodes it is started on each."""
    each, nodes = chosen.gpus_per_node, chosen.num_nodes
    if nodes == 1:
        return f"{prefix(chosen)}torchrun --standalone --nproc-per-node {each} {what}"
    return (
        f"{prefix(chosen)}torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d"
        f" --rdzv-endpoint HEAD_NODE:29500 --rdzv-id 1 {what}"
    )
