"""The compiled code that a setup runs, and why a setup is predicted for eager instead."""

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

from fsdp_bench.catalog.recorded import BENCHMARK, FLOAT8, compiled_catalog
from fsdp_bench.simulate.compiled.block import Buffers, CompiledBlock, bind_code
from fsdp_bench.simulate.models.transformer import Module, SimulatedModel, Weight
from fsdp_bench.simulate.operators.core import Operators
from fsdp_bench.simulate.operators.kernels import Kernels, Sizes
from fsdp_bench.simulate.recorded.model import RecordedModule, RecordedTransformer
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.recording.compiled import (
    CompiledCatalog,
    CompiledKind,
    Order,
    benchmark_block,
    float8_regime_of,
    huggingface_block,
    regime_of,
    sizes_of_config,
    sizes_of_shape,
    symbols_of_block,
    symbols_of_float8,
)
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import Api, Checkpointing, Float8, Loss, TrainSetup, Wrap

_MULTIPLE = 64
"""Inductor pads no row that is a multiple of 128 bytes (padding_alignment_bytes in torch/_inductor/config.py)."""
_HEAD_MULTIPLE = 8
"""Flash attention pads no such head."""


def why_eager(model: Model, setup: TrainSetup, kernels: Kernels) -> str | None:
    """Return why the prediction of a setup that compiles is for eager; None if it is not, and if nothing compiles."""
    reason = _why_blocks_are_eager(model, setup, kernels) if setup.compile else None
    if reason is None and setup.loss is Loss.COMPILED and not kernels.is_cuda:
        return "the compiled loss is predicted on CUDA alone"
    return reason


def _why_blocks_are_eager(model: Model, setup: TrainSetup, kernels: Kernels) -> str | None:
    if not kernels.is_cuda or kernels.observed or kernels.composite_norms:
        return "compiled code is recorded on CUDA alone, with norms of one kernel"
    if kernels.is_before_sm80:
        return "compiled code is recorded with FlashAttention, which torch does not have for this GPU"
    if setup.is_ddp and not setup.is_bare:
        return "DistributedDataParallel cuts compiled blocks where its buckets end, which is not modelled"
    if setup.wrap in (Wrap.SIZE, Wrap.BLOCK_AND_ADAPTERS):
        return f"with wrap = {setup.wrap.value} units may be inside of blocks, which are then not compiled whole"
    if isinstance(model, RecordedModel) and (reason := _why_code_is_eager(model)) is not None:
        return reason
    sizes = _source(model).sizes
    if sizes["head_dim"] % _HEAD_MULTIPLE or sizes["hidden_size"] % _MULTIPLE or sizes["intermediate_size"] % _MULTIPLE:
        return f"compiled code is recorded for sizes that are multiples of {_MULTIPLE}"
    codes = _source(model, setup.float8).catalog.codes
    missing = [kind for kind in _kinds(model, setup, kernels) if kind.name not in codes]
    if not missing:
        return None
    kind, tokens = missing[0], setup.micro_batch_size * setup.sequence_length
    checkpointing = " ".join(part for part in (kind.checkpointing.value, kind.policy) if part)
    dtypes = f"{8 * kind.itemsize} bits" if kind.float8 is Float8.NONE else f"float8 {kind.float8.value}"
    return (
        f"compiled code of {model.kind}'s blocks is not recorded in {dtypes} with checkpointing {checkpointing}, for"
        f" {tokens} tokens"
    )


def _why_code_is_eager(model: RecordedModel) -> str | None:
    """Return why compiled blocks of a recorded code are not known; None if they may be in the catalogue."""
    code = model.code
    if code.origin.lora is not None:
        return "blocks with adapters are not recorded compiled"
    if code.origin.code != "huggingface" or code.architecture is None:
        return f"compiled code is recorded of the benchmark models and Hugging Face's alone, not of {model.name}"
    if code.architecture.side == "beyond":
        return "blocks with a mask, beyond a sliding window, are not recorded compiled"
    if not model.repeats or model.some_variant.loops[0].period > 1:
        return f"compiled code is recorded of models whose blocks are all alike, which {model.name}'s are not"
    if not _source(model).catalog.codes:
        return f"compiled blocks of {code.origin.architecture} are not recorded"
    return None


def compile_blocks(op: Operators, built: SimulatedModel, model: Model, setup: TrainSetup) -> bool:
    """Put what torch.compile makes of them in the place of the blocks; return whether they are compiled."""
    if not setup.compile or _why_blocks_are_eager(model, setup, op.kernels) is not None:
        return False
    bound = [_bound(kind, model, setup, op.kernels) for kind in _kinds(model, setup, op.kernels)]
    for index, block in enumerate(built.blocks):
        is_checkpointed = index % setup.policy.every_blocks == 0
        code = bound[0 if is_checkpointed else -1]
        weights = _weights(built, block, code.code.inputs)
        block.put_around(CompiledBlock(op, code, weights, isinstance(built, RecordedTransformer)))
    return True


def _bound(kind: CompiledKind, model: Model, setup: TrainSetup, kernels: Kernels) -> Buffers:
    """Return a kind's code in plain numbers: of several orders of backward the one that Inductor takes.

    It takes the lowest peak, and of equals the first (reorder_for_peak_memory in torch/_inductor/memory.py).
    """
    codes = _source(model, kind.float8).catalog.codes
    symbols = symbols_of_block if kind.float8 is Float8.NONE else symbols_of_float8
    sizes = symbols(_given(model, setup), kernels.num_multiprocessors, kernels.threads_per_multiprocessor)
    names = [name for order in Order if (name := kind._replace(order=order).name) in codes]
    return min((bind_code(codes[name], sizes, kernels) for name in names), key=lambda one: one.backward_peak)


def _given(model: Model, setup: TrainSetup) -> dict[str, int]:
    return {"B": setup.micro_batch_size, "S": setup.sequence_length, **_source(model).sizes}


def _weights(model: SimulatedModel, block: Module, inputs: Iterable[str]) -> dict[str, Weight]:
    """Return the weights that a block's compiled code takes, by their names in the block."""
    names = [name for name in inputs if not name.startswith("i:")]
    if isinstance(model, RecordedTransformer):
        assert isinstance(block, RecordedModule)
        return {name: model.by_parameter[f"{block.name}.{name}"] for name in names}
    found: dict[str, Any] = {name: reduce(getattr, name.split("."), block) for name in names}
    return found


class _Source(NamedTuple):
    """Where compiled code of a model's blocks is looked up."""

    catalog: CompiledCatalog
    block: str
    """The name of the blocks' code in the catalogue."""
    sizes: dict[str, int]


def _source(model: Model, float8: Float8 = Float8.NONE) -> _Source:
    if isinstance(model, ModelShape):
        catalog = compiled_catalog(BENCHMARK if float8 is Float8.NONE else FLOAT8)
        return _Source(catalog, benchmark_block(model), sizes_of_shape(model))
    architecture = model.code.architecture
    assert architecture is not None
    catalog = compiled_catalog(architecture.model_type)
    return _Source(catalog, huggingface_block(architecture), sizes_of_config(dict(model.sizes)))


def _kinds(model: Model, setup: TrainSetup, kernels: Kernels) -> list[CompiledKind]:
    """Return the kinds of blocks that are checkpointed, and of those that a policy leaves out."""
    is_selective = setup.checkpointing is Checkpointing.SELECTIVE
    if setup.float8 is Float8.NONE:
        regime = regime_of(setup.micro_batch_size * setup.sequence_length, model.hidden_size)
    else:
        regime = float8_regime_of(_given(model, setup), setup.float8, kernels.num_multiprocessors)
    kind = CompiledKind(
        block=_source(model).block,
        itemsize=Sizes.of(setup.precision).compute,
        checkpointing=setup.checkpointing,
        policy=setup.checkpointing_policy if is_selective else None,
        regime=regime,
        float8=setup.float8,
    )
    saves_copies = setup.api is Api.FSDP1 and setup.float8 is not Float8.NONE
    without = kind._replace(checkpointing=Checkpointing.NONE, is_fsdp1=saves_copies)
    if setup.checkpointing is Checkpointing.NONE:
        return [without]
    return [kind, without] if setup.policy.is_of_blocks else [kind]
