"""A compact version of ``fsdp-bench validate --against dry-run``: drawn cells, PyTorch's own FSDP code, to the byte."""

from __future__ import annotations

import itertools
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
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.validate.memory import MemoryComparison, compare_with_dry_run, summarize, worst_first
from fsdp_bench.validate.random_setups import WORLDS, Cell, draw_cells
from tests.profiles import draws, validating
from tests.simulate.test_step import shape

CELLS = draws(4, 200)
LAYERS = draws(3, 12)
"""`make validate` draws more and deeper ones: a dry run takes as long as it has layers."""

WITH_COPIES = list(itertools.product((True, False), Checkpointing))[:: 1 if validating() else 2]


def shallow(cell: Cell) -> Cell:
    """The cell with no more layers than LAYERS, and no more micro-batches."""
    layers = min(cell.model.num_hidden_layers, LAYERS)
    micro_batches = min(cell.setup.gradient_accumulation_steps, LAYERS)
    setup = replace(cell.setup, gradient_accumulation_steps=micro_batches)
    return Cell(model=replace(cell.model, num_hidden_layers=layers), setup=setup, rank=cell.rank)


def with_copies(use_orig_params: bool, checkpointing: Checkpointing) -> Cell:
    """FSDP1 without sharding, with offload, in the dtype that is stored: nothing frees them but their successors."""
    setup = TrainSetup(
        strategy=ShardingStrategy.NO_SHARD,
        world_size=2,
        sequence_length=64,
        precision=Precision.parse("fp32"),
        offload=Offload.PARAMS,
        checkpointing=checkpointing,
        use_orig_params=use_orig_params,
    )
    return Cell(model=shape(num_hidden_layers=4, hidden_size=128, num_attention_heads=4), setup=setup)


MIXED: dict[str, Any] = {"precision": Precision.parse("bf16-mixed")}
RESHARDED: dict[str, Any] = {"api": Api.FSDP2, "world_size": 8, "reshard_after_forward": 4}
ENDS: dict[str, Any] = {"world_size": 8, "wrap": Wrap.BLOCK_AND_ENDS, **MIXED}
CHOSEN: dict[str, dict[str, Any]] = {
    "resharded, mixed, checkpointed, prefetched": RESHARDED
    | MIXED
    | {"checkpointing": Checkpointing.FULL, "forward_prefetch": True, "reshard_last_block": False},
    "resharded, offloaded, accumulated": RESHARDED
    | MIXED
    | {"offload": Offload.PARAMS, "gradient_accumulation_steps": 3, "sync_every_micro_batch": False},
    "last block stays": {"api": Api.FSDP2, "world_size": 8, "reshard_last_block": False, **MIXED},
    "every second product": MIXED
    | {"api": Api.FSDP2, "world_size": 8, "checkpointing": "selective", "checkpointing_policy": "every-second-product"},
    "saved by name": MIXED
    | {
        "world_size": 8,
        "checkpointing": "selective",
        "checkpointing_policy": "aten.silu,aten.mul,aten.mm",
    },
    "every third block, not sharded": {"api": Api.FSDP2, "strategy": "NO_SHARD", "world_size": 8}
    | {"checkpointing": Checkpointing.FULL, "checkpointing_policy": "every-3-blocks"},
    "every second block, accumulated": {"world_size": 8, "gradient_accumulation_steps": 2}
    | {"checkpointing": Checkpointing.FULL, "checkpointing_policy": "every-2-blocks"},
    "fsdp2 ends": ENDS | {"api": Api.FSDP2, "fp32_head": True},
    "fsdp1 ends, not sharded": ENDS
    | {"strategy": ShardingStrategy.NO_SHARD, "offload": Offload.PARAMS, "fp32_head": True},
    # Without the optimizer's states the first forward can have the peak, and it prefetches nothing.
    "fsdp1 ends, prefetched": ENDS
    | {"forward_prefetch": True, "sequence_length": 1, "optimizer": OptimizerKind.SGD, "strategy": "SHARD_GRAD_OP"},
}


def chosen(name: str) -> Cell:
    """A cell of more blocks than are simulated."""
    return Cell(
        model=shape(num_hidden_layers=7, hidden_size=128), setup=TrainSetup(**{"sequence_length": 64, **CHOSEN[name]})
    )


DRAWN: dict[KernelSet, tuple[Cell, ...]] = {
    "cpu": tuple(map(shallow, draw_cells(CELLS, 101, "cpu"))),
    "cuda": tuple(map(shallow, draw_cells(CELLS // 2, 102, "cuda"))),
}


@pytest.fixture(scope="module")
def compared() -> dict[KernelSet, list[MemoryComparison]]:
    """Every drawn cell and those with copies, predicted and run by one process."""
    cells = [(kernels, cell) for kernels, drawn in DRAWN.items() for cell in drawn]
    cells += [("cuda", with_copies(*case)) for case in WITH_COPIES]
    cells += [("cuda", chosen(name)) for name in CHOSEN]
    specs = [DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels, rank=cell.rank) for kernels, cell in cells]
    answers = dict(dry_runs(specs))
    found: dict[KernelSet, list[MemoryComparison]] = {"cpu": [], "cuda": []}
    for index, (kernels, cell) in enumerate(cells):
        found[kernels].append(compare_with_dry_run(cell, answers[index], kernels))
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernels", list(DRAWN))
def test_predicted_peaks_are_those_of_real_fsdp_without_data(
    kernels: KernelSet, compared: dict[KernelSet, list[MemoryComparison]]
) -> None:
    """Peak allocated equal to the byte in at least 95 % of cells, and within 0.5 % in all; every phase too."""
    count = len(DRAWN[kernels])
    comparisons = compared[kernels][:count]
    summary = summarize(comparisons, "dry run")
    worst = "\n".join(f"{c.worst} {c.label}" for c in worst_first(comparisons, 5))
    failures = [c.error for c in comparisons if c.error is not None]
    assert summary.num_failed <= 0.02 * count, failures
    assert summary.peak is not None
    assert summary.num_compared == count - summary.num_failed
    assert summary.peak.num_equal >= 0.95 * summary.num_compared, worst
    assert summary.num_equal >= 0.95 * summary.num_compared, worst
    assert max(spread.worst for spread in summary.phases.values()) <= 0.005, worst


@pytest.mark.parametrize("case", WITH_COPIES)
def test_copies_of_what_is_on_the_host_go_when_pytorch_lets_them_go(
    case: tuple[bool, Checkpointing], compared: dict[KernelSet, list[MemoryComparison]]
) -> None:
    found = compared["cuda"][len(DRAWN["cuda"]) + WITH_COPIES.index(case)]
    assert found.error is None
    assert found.is_equal, found.phases


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_resharded_or_checkpointed_and_the_units_of_the_ends_are_pytorchs(
    name: str, compared: dict[KernelSet, list[MemoryComparison]]
) -> None:
    found = compared["cuda"][len(DRAWN["cuda"]) + len(WITH_COPIES) + list(CHOSEN).index(name)]
    assert found.error is None
    assert found.is_equal, found.phases


def test_what_was_loaded_goes_before_the_gradient_scaler_comes() -> None:
    """The first forward's peak is with the one and without the other."""
    setup = TrainSetup(
        strategy=ShardingStrategy.NO_SHARD,
        world_size=8,
        sequence_length=8,
        precision=Precision.parse("fp16-mixed"),
        offload=Offload.PARAMS,
        checkpointing=Checkpointing.FULL,
        optimizer=OptimizerKind.SGD,
        wrap=Wrap.NONE,
        use_orig_params=False,
    )
    model = shape(num_hidden_layers=7, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=31)
    ((_, answer),) = dry_runs([DryRunSpec(model=model, setup=setup, kernels="cuda")])
    compared = compare_with_dry_run(Cell(model=model, setup=setup), answer, "cuda")
    assert compared.error is None
    assert compared.is_equal, compared.phases


def test_the_drawn_cells_cover_what_the_model_claims() -> None:
    """The grid is the same for the same seed, and in it is every strategy, api, precision, mode and optimizer."""
    cells = draw_cells(200, 1)
    assert cells == draw_cells(200, 1)
    for field, count in (("strategy", 5), ("api", 2), ("checkpointing", 3), ("optimizer", 6)):
        assert len({str(getattr(cell.setup, field)) for cell in cells}) == count
    assert {str(cell.setup.precision) for cell in cells} > {"fp32", "bf16-mixed", "fp16-mixed", "bf16-true"}
    assert {cell.setup.world_size for cell in cells} == set(WORLDS)
    assert any(cell.rank for cell in cells)
    assert any(cell.setup.reshard_after_forward for cell in cells)
    assert any(cell.setup.fp32_head for cell in cells)
    assert {"every-second-product", "every-2-blocks"} < {cell.setup.checkpointing_policy for cell in cells}
    assert not all(cell.setup.reshard_last_block for cell in cells)
    assert {cell.model.hidden_size % 2 for cell in cells} == {0, 1}
    assert len({cell.setup.sequence_length for cell in cells}) >= 6
