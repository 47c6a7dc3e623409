"""Compares predictions with dry runs of drawn setups, to the byte."""

import os
from itertools import islice
from multiprocessing import get_context

from msgspec.structs import replace

from fsdp_bench.plan.estimate import predict_memory
from fsdp_bench.simulate.operators.kernels import CPU, CUDA_OBSERVED, Kernels
from fsdp_bench.simulate.step import SimulatedSteps
from fsdp_bench.spec.model import ModelShape
from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunSpec, KernelSet
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.validate.memory import MemoryComparison, Summary, compare_phases, summarize
from tools.validate.random_architectures import endless_architectures
from tools.validate.random_setups import Cell, Code, Progress, draw_cells, no_progress

DRY_RUN_KERNELS: dict[KernelSet, Kernels] = {"cpu": CPU, "cuda": CUDA_OBSERVED}
"""The kernels to predict with, for a dry run of each kernel set."""


def compare_with_dry_run(cell: Cell, answer: DryRunAnswer, kernels: KernelSet) -> MemoryComparison:
    """Compare a prediction with a dry run.

    Loading is a phase of benchmark models; those of other code are loaded in other ways.
    """
    if answer.result is None:
        return MemoryComparison(label=cell.label, error=answer.error or "no answer")
    predicted = predict_memory(SimulatedSteps(cell.model, cell.setup, DRY_RUN_KERNELS[kernels]), cell.rank)
    load = {} if cell.config is not None else {"load": answer.result.load_bytes}
    phases = compare_phases(predicted.phases, {**load, **answer.result.phases})
    return MemoryComparison(label=cell.label, phases=phases)


def validate_dry_runs(
    count: int,
    seed: int,
    kernels: KernelSet,
    real_tensors: bool = False,
    progress: Progress = no_progress,
    code: Code = "benchmark",
    model_type: str | None = None,
) -> tuple[list[MemoryComparison], Summary]:
    """Compare predictions with dry runs, and optionally with real tensors.

    ``kernels`` is the device whose kernels are assumed for benchmark models; other code is run on CUDA's. With
    ``real_tensors`` small benchmark models are drawn, and each is compared with real tensors on the CPU too.
    ``progress`` is also told, before, of each model with adapters that is recorded. ``model_type`` is for other code's
    models; None for all of the catalogue in turn.

    Raises:
        SpecError: for a model_type that the catalogue does not have.
        MachineError: if torch, transformers, PEFT or torchtitan is missing.
    """
    if code == "benchmark":
        cells = draw_cells(count, seed, kernels, small=real_tensors)
        against = f"dry run{' and real tensors' if real_tensors else ''}, kernels {kernels}, seed {seed}"
    else:
        cells = tuple(islice(endless_architectures(seed, model_type, lambda what: progress(0, 0, what), code), count))
        whose, kernels = "torchtitan's" if code == "torchtitan" else "Hugging Face's", "cuda"
        against = f"dry run of {whose} code, seed {seed}"
    specs = [
        DryRunSpec(
            model=cell.model if isinstance(cell.model, ModelShape) else None,
            config=cell.config,
            code="torchtitan" if code == "torchtitan" else "huggingface",
            lora=cell.lora,
            setup=cell.setup,
            kernels=kernels,
            rank=cell.rank,
        )
        for cell in cells
    ]
    answers: dict[int, DryRunAnswer] = {}
    for index, answer in dry_runs(specs, os.cpu_count() or 1):
        answers[index] = answer
        progress(len(answers), len(specs), "dry runs")
    comparisons = [compare_with_dry_run(cell, answers[place], kernels) for place, cell in enumerate(cells)]
    if real_tensors:
        from tools.real_tensors import real_dry_run  # which imports torch

        with get_context("spawn").Pool(os.cpu_count()) as pool:
            for cell, real in zip(cells, pool.imap(real_dry_run, specs), strict=True):
                found = compare_with_dry_run(cell, real, kernels)
                comparisons.append(replace(found, label=f"{found.label}, real tensors"))
                progress(len(comparisons) - len(cells), len(cells), "runs on real tensors")
    return comparisons, summarize(comparisons, against)
