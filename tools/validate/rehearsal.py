"""Compares predictions with rehearsals of random setups: PyTorch's CUDA allocator without a GPU."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from fsdp_bench.catalog.loader import gpu_by_product_name
from fsdp_bench.simulate.operators.kernels import CUDA, kernels_on
from fsdp_bench.spec.model_code import ModelCode, TrainedModel
from fsdp_bench.spec.rank_report import Outcome
from fsdp_bench.spec.record import RunPlan, TrialRecord, TrialSpec
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.subprocesses.rehearsal import RehearsedGpu
from fsdp_bench.sweep.config.trial import Trial
from fsdp_bench.sweep.results.store import Store
from fsdp_bench.sweep.run.rehearsed import rehearsed_gpu, stand_in_environment
from fsdp_bench.sweep.run.runner import TrialRunner
from fsdp_bench.validate.memory import MemoryComparison, Summary, compare_with_allocator, summarize
from tools.validate.random_architectures import endless_architectures
from tools.validate.random_setups import (
    Cell,
    Code,
    Progress,
    endless_cells,
    endless_compiled_architectures,
    endless_compiled_cells,
    no_progress,
)

GPU = "H200"
"""The GPU that is rehearsed on: with enough memory for nearly all that is drawn."""


def validate_rehearsals(
    count: int,
    seed: int,
    compiled: bool = False,
    progress: Progress = no_progress,
    code: Code = "benchmark",
    model_type: str | None = None,
    float8: bool = False,
) -> tuple[list[MemoryComparison], Summary]:
    """Compare predictions with rehearsals of rank 0, in peak allocated by phase and in reserved memory.

    Setups with a gradient scaler are not drawn:
    gradients decide whether it skips a step, and the stand-in computes none.

    With ``compiled`` setups are drawn whose blocks are compiled, with ``float8`` those whose linear layers compute in
    float8, of benchmark models. ``model_type`` is for Hugging Face's models; None for all of the catalogue in turn.

    Raises:
        MachineError: if this machine cannot rehearse.
        SpecError: for a model_type that the catalogue does not have.
    """
    drawn = endless_rehearsable_cells(seed, compiled, code, model_type, float8)
    cells = list(islice(drawn, count))
    comparisons, gpu = list[MemoryComparison](), rehearsed_gpu(GPU)
    for one in against_rehearsals(cells, gpu):
        comparisons.append(one)
        progress(len(comparisons), count, "rehearsals")
    whose = " of Hugging Face's code" if code == "huggingface" else ""
    return comparisons, summarize(comparisons, f"rehearsals{whose} on {gpu.product_name}, seed {seed}")


def endless_rehearsable_cells(
    seed: int, compiled: bool = False, code: Code = "benchmark", model_type: str | None = None, float8: bool = False
) -> Iterator[Cell]:
    """Yield cells of rank 0 that trials can train, without a gradient scaler."""
    if code == "huggingface" and compiled:
        drawn = endless_compiled_architectures(seed, model_type)
    elif code == "huggingface":
        drawn = endless_architectures(seed, model_type)
    elif compiled or float8:
        drawn = endless_compiled_cells(seed, float8)
    else:
        drawn = endless_cells(seed, "cuda")
    return (replace(cell, rank=0) for cell in drawn if _can_be_rehearsed(cell))


def against_rehearsals(cells: Sequence[Cell], gpu: RehearsedGpu) -> Iterator[MemoryComparison]:
    """Rehearse rank 0 of each cell on a GPU; yield the comparison with its prediction.

    Raises MachineError if this machine cannot rehearse.
    """
    run = RunPlan(
        communication_steps=0,
        attention="flash",
        emulate=True,
        rehearsed_on=gpu,
        timeout_seconds=1800.0,  # compiling a deep model takes minutes where other work runs beside it
    )
    environment = stand_in_environment(gpu)
    with tempfile.TemporaryDirectory(prefix="fsdp-bench-") as folder:
        store = Store(Path(folder))
        store.open()
        with closing(store), TrialRunner("rehearsals", "fork", store, environment) as runner:
            for number, cell in enumerate(cells):
                model = trained_model(cell)
                spec = TrialSpec(id=str(number), model=model, setup=cell.setup, run=run, device="cuda")
                yield compare_with_rehearsal(cell, runner.run(Trial(spec=spec)), gpu)


def compare_with_rehearsal(cell: Cell, record: TrialRecord, on: RehearsedGpu) -> MemoryComparison:
    """Compare a prediction with a rehearsal of rank 0."""
    if record.outcome is not Outcome.OK and not record.outcome.is_oom:
        return MemoryComparison(label=cell.label, error=f"the trial ended {record.outcome.value}: {record.reason}")
    memory = record.ranks[0].memory if record.outcome is Outcome.OK else None
    gpu = gpu_by_product_name(on.product_name)
    kernels = kernels_on(CUDA, gpu, moves_model=True, flash_alone=True)
    return compare_with_allocator(cell.model, cell.setup, cell.label, memory, record.fits, kernels, on.available_bytes)


def trained_model(cell: Cell) -> TrainedModel:
    """Return the model of a cell as trials have it."""
    model = cell.model
    if not isinstance(model, RecordedModel):
        return model
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


def _can_be_rehearsed(cell: Cell) -> bool:
    trained = trained_model(cell)
    why_not = trained.why_impossible(cell.setup, "cuda") if isinstance(trained, ModelCode) else None
    return why_not is None and not cell.setup.precision.needs_grad_scaler
