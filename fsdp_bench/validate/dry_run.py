"""Compares predictions with dry runs of random setups."""

from __future__ import annotations

import os
from collections.abc import Callable

from fsdp_bench.spec.subprocesses.dry_run import DryRunAnswer, DryRunSpec, KernelSet, ModelCode, TensorKind
from fsdp_bench.sweep.dry_run import dry_runs
from fsdp_bench.validate.memory import MemoryComparison, Summary, compare_with_dry_run, summarize
from fsdp_bench.validate.random_architectures import draw_architectures
from fsdp_bench.validate.random_setups import draw_cells


def validate_architectures(
    count: int,
    seed: int,
    model_type: str | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    recording: Callable[[str], None] = lambda what: None,
    code: ModelCode = "huggingface",
) -> tuple[list[MemoryComparison], Summary]:
    """Compare predictions of recorded models with dry runs of their code, on CUDA's kernels.

    Args:
        count: number of setups to draw.
        seed: seed of the random models and setups.
        model_type: of the models; None for all of the catalogue in turn.
        progress: called with the number of runs that are done, and the number of all runs.
        recording: called with each model with adapters, which is recorded before.
        code: whose code.

    Raises:
        SpecError: for a model_type that the catalogue does not have.
        MachineError: if torch, transformers, PEFT or torchtitan is missing.
    """
    cells = draw_architectures(count, seed, model_type, recording, code)
    specs = [DryRunSpec(config=cell.config, setup=cell.setup, lora=cell.lora, code=code) for cell in cells]
    answers: dict[int, DryRunAnswer] = {}
    for index, answer in dry_runs(specs, os.cpu_count() or 1):
        answers[index] = answer
        progress(len(answers), len(specs))
    comparisons = [compare_with_dry_run(cell, answers[place], "cuda") for place, cell in enumerate(cells)]
    whose = "torchtitan's" if code == "torchtitan" else "Hugging Face's"
    return comparisons, summarize(comparisons, f"dry run of {whose} code, seed {seed}")


def validate_dry_runs(
    count: int,
    seed: int,
    kernels: KernelSet,
    real_tensors: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[MemoryComparison], Summary]:
    """Compare predictions with dry runs, and optionally with real tensors.

    Args:
        count: number of setups to draw.
        seed: seed of the random setups.
        kernels: the device whose kernels are assumed.
        real_tensors: draw small models, and run each with real tensors on the CPU too.
        progress: called with the number of runs that are done, and the number of all runs.
    """
    cells = draw_cells(count, seed, kernels, small=real_tensors)
    kinds: list[TensorKind] = ["fake", "real"] if real_tensors else ["fake"]
    specs = [
        DryRunSpec(model=cell.model, setup=cell.setup, kernels=kernels, rank=cell.rank, tensors=kind)
        for cell in cells
        for kind in kinds
    ]
    answers: dict[int, DryRunAnswer] = {}
    for index, answer in dry_runs(specs, os.cpu_count() or 1):
        answers[index] = answer
        progress(len(answers), len(specs))
    each = len(kinds)
    comparisons = [
        compare_with_dry_run(cell, answers[each * place], kernels, answers[each * place + 1] if real_tensors else None)
        for place, cell in enumerate(cells)
    ]
    against = "dry run and real tensors" if real_tensors else "dry run"
    return comparisons, summarize(comparisons, f"{against}, kernels {kernels}, seed {seed}")
