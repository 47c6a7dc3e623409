"""Which compiled code a setup runs, and why a setup is predicted for eager instead."""

from __future__ import annotations

from fsdp_bench.catalog.compiled import compiled_catalog
from fsdp_bench.simulate.compiled.block import CompiledBlock, bind_code
from fsdp_bench.simulate.models.transformer import SimulatedModel
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import Kernels
from fsdp_bench.simulate.operators.precision import Sizes
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.compiled import CompiledKind, regime_of, symbols_of_block
from fsdp_bench.spec.recording.model import Model
from fsdp_bench.spec.setup import Api, Checkpointing, Loss, ShardingStrategy, TrainSetup, Wrap

_MULTIPLE = 64
"""Of a multiple of 128 bytes Inductor pads no row (padding_alignment_bytes in torch/_inductor/config.py)."""
_HEAD_MULTIPLE = 8
"""Flash attention pads no such head."""


def why_eager(model: Model, setup: TrainSetup, kernels: Kernels) -> str | None:
    """Return why the prediction of a setup that compiles is for eager; None if it is not, and if nothing compiles."""
    reason = _why_blocks_are_eager(model, setup, kernels) if setup.compile else None
    if reason is None and setup.loss is Loss.COMPILED and not kernels.is_cuda:
        return "the compiled loss is predicted on CUDA alone"
    return reason


def _why_blocks_are_eager(model: Model, setup: TrainSetup, kernels: Kernels) -> str | None:
    if not isinstance(model, ModelShape):
        return f"compiled code is recorded of the benchmark models alone, not of {model.name}"
    if not kernels.is_cuda or kernels.observed or kernels.composite_norms:
        return "compiled code is recorded on CUDA alone, with norms of one kernel"
    if setup.api is Api.FSDP2 and setup.strategy is ShardingStrategy.NO_SHARD:
        return "DistributedDataParallel cuts compiled blocks where its buckets end, which is not modelled"
    if setup.wrap is Wrap.SIZE:
        return "with wrap = size units may be inside of blocks, which are then not compiled whole"
    if model.head_dim % _HEAD_MULTIPLE or model.hidden_size % _MULTIPLE or model.intermediate_size % _MULTIPLE:
        return f"compiled code is recorded for sizes that are multiples of {_MULTIPLE}"
    missing = {kind.name for kind in _kinds(model, setup)} - set(compiled_catalog().codes)
    return f"compiled code is not recorded for {min(missing)}" if missing else None


def compile_blocks(op: Operators, model: SimulatedModel, shape: Model, setup: TrainSetup) -> bool:
    """Put what torch.compile makes of them in the place of the blocks; return whether they are compiled."""
    if not setup.compile or _why_blocks_are_eager(shape, setup, op.kernels) is not None:
        return False
    assert isinstance(shape, ModelShape)
    kernels = op.kernels
    given = {
        "B": setup.micro_batch_size,
        "S": setup.sequence_length,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
    }
    sizes = symbols_of_block(given, kernels.num_multiprocessors, kernels.threads_per_multiprocessor)
    codes = [bind_code(compiled_catalog().codes[kind.name], sizes, kernels) for kind in _kinds(shape, setup)]
    for index, block in enumerate(model.blocks):
        is_checkpointed = index % setup.policy.every_blocks == 0
        block.put_around(CompiledBlock(op, codes[0 if is_checkpointed else -1], block))
    return True


def _kinds(shape: ModelShape, setup: TrainSetup) -> list[CompiledKind]:
    """Return the kinds of blocks that are checkpointed, and of those that a policy leaves out."""
    is_selective = setup.checkpointing is Checkpointing.SELECTIVE
    kind = CompiledKind(
        family=shape.family,
        is_grouped=shape.num_key_value_heads < shape.num_attention_heads,
        itemsize=Sizes.of(setup.precision).compute,
        checkpointing=setup.checkpointing,
        policy=setup.checkpointing_policy if is_selective else None,
        regime=regime_of(setup.micro_batch_size * setup.sequence_length, shape.hidden_size),
    )
    return [kind, kind._replace(checkpointing=Checkpointing.NONE)] if setup.policy.is_of_blocks else [kind]
