"""Why a model cannot be trained under a setup, or why what it would take is not predicted."""

from __future__ import annotations

from fsdp_bench.simulate.compiled.choose import why_eager
from fsdp_bench.simulate.models.build import few_blocks
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import CPU, CUDA
from fsdp_bench.simulate.tape import Tape
from fsdp_bench.simulate.wrappers.not_recorded import why_not_recorded
from fsdp_bench.simulate.wrappers.units import choose_units
from fsdp_bench.spec.impossible import (
    FLOAT8_MULTIPLE,
    POLICY_AROUND_UNITS,
    SELECTIVE_AROUND_UNITS,
    TIED_ENDS,
    impossible,
)
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import (
    Api,
    BackwardPrefetch,
    Checkpointing,
    Float8,
    Offload,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)

_INSIDE_BLOCKS = (Wrap.SIZE, Wrap.BLOCK_AND_ADAPTERS)
"""What may make units of parts of a block."""


def why_impossible(model: Model, setup: TrainSetup, device: str) -> str | None:
    """Return why a model cannot be trained under a setup on ``cuda`` or ``cpu``, or None."""
    has_ends = setup.wrap is Wrap.BLOCK_AND_ENDS
    reason = impossible(setup, device) or why_not_recorded(model, setup, device)
    if reason is None and _may_fail_with_units_inside_blocks(setup) and _has_units_inside_blocks(model, setup):
        return SELECTIVE_AROUND_UNITS
    has_own_policy = setup.checkpointing is Checkpointing.SELECTIVE and setup.checkpointing_policy is not None
    may_save_units = has_own_policy and setup.wrap in _INSIDE_BLOCKS and not setup.is_ddp
    if reason is None and may_save_units and _has_units_inside_blocks(model, setup):
        return POLICY_AROUND_UNITS
    if reason is None and has_ends and isinstance(model, ModelShape) and model.tie_word_embeddings and not setup.is_ddp:
        return TIED_ENDS
    return reason or _float8_not_predicted(model, setup)


def _float8_not_predicted(model: Model, setup: TrainSetup) -> str | None:
    """Return why a model's linear layers in float8 are not predicted, or cannot run."""
    if setup.float8 is Float8.NONE:
        return None
    if isinstance(model, RecordedModel):
        return "float8 is predicted for the benchmark Llama alone (--code benchmark), whose blocks are recorded in it"
    sizes = {
        "hidden_size": model.hidden_size,
        "key-value heads": model.kv_size,
        "intermediate": model.intermediate_size,
    }
    for name, size in sizes.items():
        if size % FLOAT8_MULTIPLE:
            return f"float8 needs widths that are multiples of {FLOAT8_MULTIPLE} (torch._scaled_mm), not {name} {size}"
    reason = why_eager(model, setup, CUDA)
    return None if reason is None else f"float8 is predicted compiled alone: {reason}"


def _may_fail_with_units_inside_blocks(setup: TrainSetup) -> bool:
    """Whether a recomputed block can run more operators or annotations than forward did: see SELECTIVE_AROUND_UNITS.

    Those of FSDP1: the rate limiter's annotation (_runtime_utils.py, _unshard); the views of a unit that was gathered
    ahead of its block in forward, and not in backward (_use_unsharded_flat_param); where offloaded gradients are
    written back to original parameters, a tensor for them (_writeback_orig_params).
    """
    gathers_ahead = setup.forward_prefetch and setup.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE
    writes_back = setup.use_orig_params and setup.offload is Offload.PARAMS
    recomputes_more = setup.api is Api.FSDP2 or setup.limit_all_gathers or gathers_ahead or writes_back
    is_sharded = setup.effective_strategy is not ShardingStrategy.NO_SHARD
    is_selective = setup.checkpointing is Checkpointing.SELECTIVE
    return setup.wrap in _INSIDE_BLOCKS and is_selective and is_sharded and recomputes_more


def _has_units_inside_blocks(model: Model, setup: TrainSetup) -> bool:
    """Whether wrapping by size makes units of parts of a block."""
    built = few_blocks(Operators(Tape(), CPU), model, setup)
    inside = {id(module) for block in built.blocks for module in block.all_modules()} - set(map(id, built.blocks))
    return any(id(module) in inside for unit in choose_units(built, setup) for module in unit.modules)
