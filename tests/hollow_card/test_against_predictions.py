"""Predictions against PyTorch's own CUDA allocator, on drawn setups. Skipped but under card.py: see ``make hollow``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.replay.caching_allocator.program import program
from fsdp_bench.replay.caching_allocator.replay import AllocatorReading, Replay
from fsdp_bench.simulate.operators.kernels import CUDA, Kernels, kernels_on
from fsdp_bench.simulate.step import first_steps
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.rank_report import Outcome, RankReport
from fsdp_bench.spec.record import RunPlan, TrialSpec
from fsdp_bench.sweep.run.fork_server import ForkServer
from fsdp_bench.validate.random_setups import Cell, draw_cells
from tests.replay.replaying import EverythingTakes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("libhollow_card" not in os.environ.get("LD_PRELOAD", ""), reason="no hollow card: make hollow"),
]

DRAWN, SEED = (int(os.environ.get(f"FSDP_BENCH_TEST_{name}", usual)) for name, usual in (("CELLS", 110), ("SEED", 4)))
CELLS = [
    cell
    for cell in draw_cells(DRAWN, SEED, device="cuda")
    if not cell.setup.precision.needs_grad_scaler  # an overflow is decided by values, and there are none
]
PLAN = RunPlan(warmup_steps=2, steps=3, communication_steps=0, attention="flash", emulate=True)


def measured(cells: list[Cell], folder: Path) -> Iterator[RankReport]:
    """Train every cell as rank 0 of its world; one process after another takes the trials."""
    server = ForkServer(folder / "server.log", str(folder), resident=True)
    try:
        for number, cell in enumerate(cells):
            scratch = folder / str(number)
            scratch.mkdir()
            spec = TrialSpec(id=str(number), model=cell.model, setup=cell.setup, run=PLAN, device="cuda")
            (scratch / "trial.json").write_bytes(to_json(spec))
            launched = server.start(scratch / "trial.json", scratch, 1, may_share=True)
            while not launched.finished:
                launched.wait(1.0)
            yield from_json((scratch / "rank-0.json").read_bytes(), RankReport)
    finally:
        server.close()


def predicted_on_stand_in(cell: Cell, kernels: Kernels) -> AllocatorReading:
    """Predict rank 0 on the stand-in, which has no time: it does all work late, in the order of issue."""
    log = first_steps(cell.model, cell.setup, kernels)
    steps = program(log) or program(first_steps(cell.model, cell.setup, kernels, 0, cell.model.num_hidden_layers))
    assert steps is not None
    return Replay(steps, EverythingTakes(1.0)).until()


@pytest.mark.timeout(1800)
def test_pytorchs_allocator_holds_what_is_predicted(tmp_path: Path) -> None:
    kernels = kernels_on(CUDA, gpu_by_product_name(os.environ["HOLLOW_CARD_NAME"]))
    errors: dict[str, list[float]] = {"peak": [], "reserved": []}
    for cell, report in zip(CELLS, measured(CELLS, tmp_path), strict=True):
        assert report.outcome is Outcome.OK, (cell.label, report.failure)
        memory, reading = report.memory, predicted_on_stand_in(cell, kernels)
        assert memory is not None
        measured_bytes = {**memory.phases, "peak": memory.peak_allocated_bytes, "reserved": memory.peak_reserved_bytes}
        predicted_bytes = {
            **reading.phases,
            "peak": reading.peak_allocated_bytes,
            "reserved": reading.peak_reserved_bytes,
        }
        for name, value in measured_bytes.items():
            assert value
            error = predicted_bytes[name] / value - 1
            errors.setdefault(name, []).append(error)
            if error:
                print(f"{error:+.2%} {name}: {predicted_bytes[name]} for {value}: {cell.label}")
    for name, relative in errors.items():
        sizes = sorted(map(abs, relative))
        print(f"{name}: equal in {sizes.count(0)} of {len(sizes)}, median {median(sizes):.3%}, worst {sizes[-1]:.3%}")
    assert errors["peak"].count(0) >= 0.95 * len(CELLS)
    assert max(map(abs, errors["peak"])) <= 0.03
    assert errors["reserved"].count(0) >= 0.85 * len(CELLS)
    assert median(map(abs, errors["reserved"])) <= 0.05
