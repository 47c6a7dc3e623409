"""Compares predictions with rehearsals of random setups: PyTorch's CUDA allocator without a GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.spec.codec import from_json, to_json
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.rank_report import Failure, Outcome, RankReport
from fsdp_bench.spec.record import RunPlan, TrialSpec
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.launchers.one_node import ForkServer
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu, stand_in_environment
from fsdp_bench.sweep.run.runner import TimeLimit
from fsdp_bench.validate.memory import MemoryComparison, Summary, compare_with_allocator, summarize
from tools.validate.compiled_setups import draw_compiled_architectures, draw_compiled_cells
from tools.validate.random_architectures import ArchitectureCell, draw_architectures
from tools.validate.random_setups import Cell, draw_cells

Code = Literal["benchmark", "huggingface"]
GPU = "H200"
"""The GPU that is rehearsed on: with enough memory for nearly all that is drawn."""


def validate_rehearsals(
    count: int,
    seed: int,
    compiled: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    code: Code = "benchmark",
    model_type: str | None = None,
    float8: bool = False,
) -> tuple[list[MemoryComparison], Summary]:
    """Compare predictions with rehearsals of rank 0, in peak allocated by phase and in reserved memory.

    Setups with a gradient scaler are not drawn:
    gradients decide whether it skips a step, and the stand-in computes none.

    Args:
        count: number of setups to draw.
        seed: seed of the random setups.
        compiled: draw setups whose blocks are compiled.
        progress: called with the number of rehearsals that are done, the number of all, and what is done.
        code: whose models are drawn.
        model_type: of Hugging Face's models; None for all of the catalogue in turn.
        float8: draw setups whose linear layers compute in float8, of benchmark models.

    Raises:
        MachineError: if this machine cannot rehearse.
        SpecError: for a model_type that the catalogue does not have.
    """
    gpu = rehearsed_gpu(GPU)
    cells = draw_compiled_cells(count, seed, float8=True) if float8 else _cells(count, seed, compiled, code, model_type)
    # Compiling a deep model takes minutes where other work runs beside it.
    run = RunPlan(communication_steps=0, attention="flash", emulate=True, rehearsed_on=gpu, timeout_seconds=1800.0)
    specs = [
        TrialSpec(id=str(number), model=trained_model(cell), setup=cell.setup, run=run, device="cuda")
        for number, cell in enumerate(cells)
    ]
    comparisons, whose = [], " of Hugging Face's code" if code == "huggingface" else ""
    for cell, report in zip(cells, rehearsals(specs, gpu), strict=True):
        comparisons.append(compare_with_rehearsal(cell, report, gpu))
        progress(len(comparisons), count, "rehearsals")
    return comparisons, summarize(comparisons, f"rehearsals{whose} on {gpu.product_name}, seed {seed}")


def _cells(
    count: int, seed: int, compiled: bool, code: Code, model_type: str | None
) -> Sequence[Cell | ArchitectureCell]:
    if code == "benchmark":
        return draw_compiled_cells(count, seed) if compiled else _draw(count, seed)
    if compiled:
        return draw_compiled_architectures(count, seed, model_type)
    return _draw_architectures(count, seed, model_type)


def compare_with_rehearsal(cell: Cell | ArchitectureCell, report: RankReport, on: RehearsedGpu) -> MemoryComparison:
    """Compare a prediction with a rehearsal of rank 0."""
    if report.outcome is not Outcome.OK and not report.outcome.is_oom:
        why = report.failure.message if report.failure else "it left no report"
        return MemoryComparison(label=cell.label, error=f"the trial ended {report.outcome.value}: {why}")
    memory = report.memory if report.outcome is Outcome.OK else None
    fits = memory is not None and not memory.num_alloc_retries
    gpu = gpu_by_product_name(on.product_name)
    return compare_with_allocator(cell.model, cell.setup, cell.label, memory, fits, gpu, on.available_bytes)


def trained_model(cell: Cell | ArchitectureCell) -> TrainedModel:
    """Return the model of a cell as trials have it."""
    if isinstance(cell, Cell):
        return cell.model
    model = cell.model
    return ModelCode(
        name=model.name,
        code="huggingface",
        architecture=model.code.origin.architecture,
        num_parameters=model.num_parameters,
        num_hidden_layers=model.num_hidden_layers,
        has_tokens=model.has_tokens,
        config=cell.config,
        lora=cell.lora,
    )


def _draw_architectures(count: int, seed: int, model_type: str | None) -> list[ArchitectureCell]:
    """Return the first cells of a seed without a gradient scaler that trials can train."""
    drawn, found = count, list[ArchitectureCell]()
    while len(found) < count:
        drawn *= 2
        found = [cell for cell in draw_architectures(drawn, seed, model_type) if _can_be_rehearsed(cell)]
    return found[:count]


def _can_be_rehearsed(cell: ArchitectureCell) -> bool:
    trained = trained_model(cell)
    assert isinstance(trained, ModelCode)
    return not cell.setup.precision.needs_grad_scaler and trained.why_impossible(cell.setup, "cuda") is None


def _draw(count: int, seed: int) -> list[Cell]:
    """Return the first setups of a seed without a gradient scaler, each as rank 0."""
    drawn, found = count, list[Cell]()
    while len(found) < count:
        drawn *= 2
        cells = draw_cells(drawn, seed, device="cuda")
        found = [msgspec.structs.replace(cell, rank=0) for cell in cells if not cell.setup.precision.needs_grad_scaler]
    return found[:count]


# -- running rehearsals -----------------------------------------------------------------------------------------------


POLL_SECONDS = 0.5
"""Time between two checks of the time limit."""


def rehearsals(specs: Iterable[TrialSpec], gpu: RehearsedGpu) -> Iterator[RankReport]:
    """Yield what rank 0 of each trial reports, in order.

    A trial without a report is yielded as ``timeout`` after its time limit, else as ``crashed``, with the reason.

    Raises:
        MachineError: if this machine cannot rehearse.
    """
    environment = stand_in_environment(gpu)
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as folder:
        server = ForkServer(Path(folder) / "server.log", folder, environment)
        try:
            for number, spec in enumerate(specs):
                scratch = Path(folder) / str(number)
                scratch.mkdir()
                yield _rehearse(spec, scratch, server)
        finally:
            server.close()


def _rehearse(spec: TrialSpec, scratch: Path, server: ForkServer) -> RankReport:
    (scratch / "trial.json").write_bytes(to_json(spec))
    launched = server.start(scratch / "trial.json", scratch, spec.num_processes)
    limit = TimeLimit(spec.run.timeout_seconds)
    try:
        while not launched.finished and not limit.has_run_out():
            launched.wait(POLL_SECONDS)
    finally:
        killed = not launched.finished
        if killed:
            launched.kill()
    try:
        return from_json((scratch / "rank-0.json").read_bytes(), RankReport).without_times()
    except (OSError, msgspec.DecodeError):
        if killed:
            return _without_report(Outcome.TIMEOUT, f"not done after {spec.run.timeout_seconds:g} s")
        return _without_report(Outcome.CRASHED, "it left no report, or one that cannot be read")


def _without_report(outcome: Outcome, message: str) -> RankReport:
    failure = Failure(message=message, phase="unknown", at=time.time())
    return RankReport(rank=0, outcome=outcome, failure=failure)
