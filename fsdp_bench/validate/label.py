"""A model and a setup in one line, with what sets a trial apart from others."""

from __future__ import annotations

from fsdp_bench.spec.model_code import TrainedModel
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.setup import Offload, TrainSetup


def cell_label(model: TrainedModel | RecordedModel, setup: TrainSetup, rank: int = 0) -> str:
    """Return a model and a setup in one line."""
    width = f" x {model.hidden_size}" if model.hidden_size else " layers"  # a recording for one size names none
    parts = [model.kind, f"{model.num_hidden_layers}{width}"]
    parts += [setup.api.value, setup.strategy.value, f"world {setup.world_size}", str(setup.precision)]
    policy = f" {setup.checkpointing_policy}" if setup.checkpointing_policy else ""
    parts += [f"checkpointing {setup.checkpointing.value}{policy}", setup.optimizer.value]
    parts += [f"batch {setup.micro_batch_size} x {setup.sequence_length}", f"wrap {setup.wrap.value}"]
    if setup.gradient_accumulation_steps > 1:
        parts.append(f"accumulate {setup.gradient_accumulation_steps}")
    if setup.offload is not Offload.NONE:
        parts.append("offload" if setup.offload is Offload.PARAMS else "offload optimizer")
    if setup.activation_offload:
        parts.append("activation offload")
    if setup.optimizer_in_backward:
        parts.append("optimizer in backward")
    if setup.reshard_after_forward is not None:
        parts.append(f"reshard after forward {setup.reshard_after_forward}")
    if not setup.reshard_last_block:
        parts.append("last block not resharded")
    if setup.fp32_head:
        parts.append("fp32 head")
    if rank:
        parts.append(f"rank {rank}")
    return ", ".join(parts)
