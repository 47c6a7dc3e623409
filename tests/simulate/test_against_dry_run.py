"""Predicted peaks of drawn and chosen setups against dry runs of PyTorch's own FSDP code, to the byte."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_bench.spec.setup import (
    Api,
    Checkpointing,
    Offload,
    OptimizerKind,
    Precision,
    ShardingStrategy,
    TrainSetup,
    Wrap,
)
from fsdp_bench.spec.subprocesses.dry_run import DryRunSpec, KernelSet
from fsdp_bench.sweep.dry_run import dry_runs, result_of
from tests.profiles import draws
from tests.shapes import memory_of, shape
from tests.simulate.comparing import OBSERVED, assert_equals_dry_runs, cells_with
from tests.simulate.test_optimizers import IN_BACKWARD, UNSHARDED
from tools.validate.random_setups import WORLDS, Cell, draw_cells

LAYERS = draws(2, 6)
"""``make validate`` compares deeper models: the time of a dry run grows with the layers."""
SEEDS: dict[KernelSet, int] = {"cpu": 101, "cuda": 102}
NUM_DRAWN = draws(4, 100)
QUICK_DRAWN: dict[KernelSet, tuple[int, ...]] = {"cpu": (0, 3), "cuda": (0, 1)}
"""The fastest of the first four, with one or two layers."""


def shallow(cell: Cell) -> Cell:
    """The cell with no more layers than LAYERS, and no more micro-batches."""
    layers = min(cell.model.num_hidden_layers, LAYERS)
    micro_batches = min(cell.setup.gradient_accumulation_steps, LAYERS)
    setup = replace(cell.setup, gradient_accumulation_steps=micro_batches)
    return Cell(model=replace(cell.model, num_hidden_layers=layers), setup=setup, rank=cell.rank)


MIXED: dict[str, Any] = {"precision": Precision.parse("bf16-mixed")}
RESHARDED: dict[str, Any] = {"api": Api.FSDP2, "world_size": 8, "reshard_after_forward": 4}
COPIES: dict[str, Any] = {"strategy": "NO_SHARD", "world_size": 2, "precision": "fp32", "offload": "params"}
ENDS: dict[str, Any] = {"world_size": 8, "wrap": Wrap.BLOCK_AND_ENDS, **MIXED}
CHOSEN: dict[str, dict[str, Any]] = {
    "resharded, mixed, checkpointed, prefetched": RESHARDED
    | MIXED
    | {"checkpointing": Checkpointing.FULL, "forward_prefetch": True, "reshard_last_block": False},
    "resharded, offloaded, accumulated": RESHARDED
    | MIXED
    | {"offload": Offload.PARAMS, "gradient_accumulation_steps": draws(2, 3), "sync_every_micro_batch": False},
    "last block stays": {"api": Api.FSDP2, "world_size": 8, "reshard_last_block": False, **MIXED},
    "every second product": MIXED
    | {"api": Api.FSDP2, "world_size": 8, "checkpointing": "selective", "checkpointing_policy": "every-second-product"},
    "saved by name": MIXED
    | {"world_size": 8, "checkpointing": "selective", "checkpointing_policy": "aten.silu,aten.mul,aten.mm"},
    "every third block, not sharded": {"api": Api.FSDP2, "strategy": "NO_SHARD", "world_size": 8}
    | {"checkpointing": Checkpointing.FULL, "checkpointing_policy": "every-3-blocks"},
    "every second block, accumulated": {"world_size": 8, "gradient_accumulation_steps": 2}
    | {"checkpointing": Checkpointing.FULL, "checkpointing_policy": "every-2-blocks"},
    "reentrant around units, accumulated": MIXED
    | {"world_size": 8, "checkpointing": "full", "reentrant": "around"}
    | {"gradient_accumulation_steps": 2, "sync_every_micro_batch": False},
    "reentrant, prefetched": ENDS
    | {"api": Api.FSDP2, "checkpointing": "full", "reentrant": "inside", "forward_prefetch": True},
    "reentrant, offloaded": MIXED
    | {"world_size": 8, "offload": Offload.PARAMS, "checkpointing": "full", "reentrant": "around"},
    "reentrant, not sharded": {"api": Api.FSDP2, "strategy": "NO_SHARD", "world_size": 8, **MIXED}
    | {"checkpointing": "full", "reentrant": "inside"},
    "one GPU without FSDP": MIXED
    | {"api": Api.FSDP2, "strategy": "NO_SHARD", "gradient_accumulation_steps": 2, "max_grad_norm": 1.0},
    "fsdp2 ends": ENDS | {"api": Api.FSDP2, "fp32_head": True},
    "fsdp1 ends, not sharded": ENDS
    | {"strategy": ShardingStrategy.NO_SHARD, "offload": Offload.PARAMS, "fp32_head": True},
    # Without the optimizer's states the first forward can have the peak, and it prefetches nothing.
    "fsdp1 ends, prefetched": ENDS
    | {"forward_prefetch": True, "sequence_length": 1, "optimizer": "sgd", "strategy": "SHARD_GRAD_OP"},
    # FSDP1 without sharding, offloaded, in one dtype: only the next copy of a parameter frees the last one.
    **{
        f"copies of what is on the host, {'with' if flags else 'without'} use_orig_params, {kind.value}": COPIES
        | {"use_orig_params": flags, "checkpointing": kind}
        for flags in (True, False)
        for kind in Checkpointing
    },
}


def chosen(name: str) -> Cell:
    """A chosen setup, for a model of more blocks than the four that are simulated."""
    return Cell(
        model=shape(num_hidden_layers=draws(5, 7), hidden_size=128),
        setup=TrainSetup(**{"sequence_length": 64, **CHOSEN[name]}),
    )


def loaded_before_the_scaler() -> Cell:
    """Loaded tensors are freed before the gradient scaler allocates: the first forward's peak has one of both."""
    fields: dict[str, Any] = {"strategy": "NO_SHARD", "world_size": 8, "sequence_length": 8, "precision": "fp16-mixed"}
    fields |= {"offload": "params", "checkpointing": "full", "optimizer": "sgd", "wrap": "none"}
    setup = TrainSetup(**fields, use_orig_params=False)
    model = shape(num_hidden_layers=7, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=31)
    return Cell(model=model, setup=setup)


FIXED: dict[str, tuple[int, dict[str, Any], tuple[KernelSet, ...]]] = {
    "Adafactor": (51, {"optimizer": "adafactor"}, ("cpu", "cuda")),
    "optimizer in backward": (53, IN_BACKWARD, ("cpu", "cuda")),
    "Muon": (57, UNSHARDED, ("cpu", "cuda")),
    "activation offload": (82, {"activation_offload": True}, ("cuda",)),
}
"""Drawn cells with fixed fields: the seed, the fields, and the kernels."""
QUICK_CHOSEN = {
    *("resharded, mixed, checkpointed, prefetched", "resharded, offloaded, accumulated", "every second product"),
    *("reentrant around units, accumulated", "reentrant, prefetched", "one GPU without FSDP"),
    *("every third block, not sharded", "fsdp2 ends", "fsdp1 ends, prefetched"),
    "copies of what is on the host, with use_orig_params, full",
    "copies of what is on the host, without use_orig_params, none",
}
"""One of each setting. The others combine the same settings with other strategies."""


def _case(name: str, kernels: KernelSet, cell: Callable[[], Cell], is_quick: bool) -> Any:
    return pytest.param(kernels, cell, id=f"{name} {kernels}", marks=() if is_quick else pytest.mark.slow)


@cache
def _drawn_cells(kernels: KernelSet) -> list[Cell]:
    return draw_cells(NUM_DRAWN, SEEDS[kernels], kernels)


def _drawn(kernels: KernelSet, index: int) -> Cell:
    return shallow(_drawn_cells(kernels)[index])


def _with_fields(name: str, kernels: KernelSet, index: int) -> Cell:
    seed, fields, _ = FIXED[name]
    return shallow(cells_with(8, seed, kernels, small=True, **fields)[index])


def _cases() -> Iterator[Any]:
    """Yield the kernels of each case and a function that returns its cell, because drawing takes long."""
    for kernels in SEEDS:
        for index in range(NUM_DRAWN):
            yield _case(f"drawn {index}", kernels, partial(_drawn, kernels, index), index in QUICK_DRAWN[kernels])
    for name, (_, _, several) in FIXED.items():
        for kernels in several:
            for index in range(8):
                yield _case(f"{name} {index}", kernels, partial(_with_fields, name, kernels, index), index == 0)
    for name in CHOSEN:
        yield _case(name, "cuda", partial(chosen, name), name in QUICK_CHOSEN)
    yield _case("what was loaded before the gradient scaler", "cuda", loaded_before_the_scaler, True)


@pytest.mark.parametrize(("kernels", "cell"), list(_cases()))
def test_every_phase_equals_the_dry_run(kernels: KernelSet, cell: Callable[[], Cell]) -> None:
    assert_equals_dry_runs(cell(), kernels)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        *(({"precision": each}, 1) for each in ("bf16-mixed", "fp16-mixed")),
        *(pytest.param({"precision": each}, 20, marks=pytest.mark.slow) for each in ("bf16-mixed", "fp16-mixed")),
        # selective checkpointing keeps products of single operators
        ({"precision": "bf16-mixed", "checkpointing": "selective", "checkpointing_policy": "aten.bmm,aten.add"}, 1),
    ],
    ids=str,
)
def test_every_phase_on_a_t4_equals_the_dry_run(fields: dict[str, str], count: int) -> None:
    """torch has no FlashAttention there. fp16 takes memory-efficient attention.

    bf16, grouped keys and heads of odd sizes take single operators.
    """
    cells = cells_with(count, 75, "cuda", small=True, gradient_accumulation_steps=1, compile=False, **fields)
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, rank=cell.rank, before_sm80=True) for cell in cells]
    t4 = dataclasses.replace(OBSERVED, compute_capability=7.5)
    for index, answer in dry_runs(specs):
        result, cell = result_of(answer), cells[index]
        found = memory_of(cell.model, cell.setup, t4, cell.rank).phases
        assert found == {"load": result.load_bytes, **result.phases}, cell.label


def test_the_drawn_cells_cover_what_the_model_claims() -> None:
    """The grid is the same for the same seed, and in it is every strategy, api, precision, mode and optimizer."""
    cells = draw_cells(200, 1)
    assert cells == draw_cells(200, 1)
    for field, count in (("strategy", 5), ("api", 2), ("checkpointing", 3)):
        assert len({str(getattr(cell.setup, field)) for cell in cells}) == count
    assert {cell.setup.optimizer for cell in cells} == set(OptimizerKind) - {OptimizerKind.ADAMW_8BIT}
    assert {str(cell.setup.precision) for cell in cells} > {"fp32", "bf16-mixed", "fp16-mixed", "bf16-true"}
    assert {cell.setup.world_size for cell in cells} == set(WORLDS)
    assert any(cell.rank for cell in cells)
    assert any(cell.setup.reshard_after_forward for cell in cells)
    assert any(cell.setup.fp32_head for cell in cells)
    assert {"every-second-product", "every-2-blocks"} < {cell.setup.checkpointing_policy for cell in cells}
    assert not all(cell.setup.reshard_last_block for cell in cells)
    assert {cell.model.hidden_size % 2 for cell in cells} == {0, 1}
    assert len({cell.setup.sequence_length for cell in cells}) >= 6
