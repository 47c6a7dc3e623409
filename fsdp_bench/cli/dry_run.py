"""``fsdp-bench dry-run``: PyTorch's own FSDP code on fake tensors, without GPUs."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fsdp_bench.cli.common.assumptions import AssumptionOptions, assumption_options
from fsdp_bench.cli.common.options import FILE, SETUP_LISTS, SetupCommand, SetupOptions, setup_options
from fsdp_bench.cli.common.printing import COLOURS, print_json, print_text
from fsdp_bench.cli.common.setups import (
    Reading,
    config_meant,
    read_code,
    read_lora,
    read_models,
    read_setups,
    warn_of_sliding_window,
)
from fsdp_bench.plan.dry_run import DryRun, dry_run_document
from fsdp_bench.plan.headroom import as_stated, stated_headroom
from fsdp_bench.report.terminal import print_line
from fsdp_bench.report.text.dry_run import report, side_by_side
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.recording.model import RecordedModel
from fsdp_bench.spec.subprocesses.dry_run import SIZES, DryRunAnswer, DryRunSpec, KernelSet, UserModule
from fsdp_bench.sweep.dry_run import NEEDS_CODE, DryRunError, dry_runs, result_of

ANNOUNCED_AFTER_SECONDS = 2.0
"""Seconds after which a progress line says on standard error that the dry run is running."""

NOT_OF_A_MODULE = ("model", "hf_config", "recorded", "code", "attention", "lora", "qlora", "params", "family", "loss")
"""Options that contradict --module: its function returns the model and the batch."""


@click.command("dry-run", cls=SetupCommand)
@click.option(
    "--module",
    metavar="PKG.MOD:FUNCTION",
    help="A function that returns (nn.Module, batch). The model is called model(**batch) for a dict, model(*batch)"
    " for a tuple or list, else model(batch); the loss is output.loss, output['loss'], a scalar output, or the mean of"
    " the first floating tensor in it. --batch and --seq are passed to the function's parameters micro_batch_size and"
    " sequence_length.",
)
@click.option(
    "--transformer-block", "block", metavar="PKG.MOD:CLASS", help="With --module: class of the model's blocks."
)
@assumption_options(without=("load", "calibration", "expandable_segments", "cuda"))
@click.option("--trace", type=FILE, help="Write every allocation and free into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@setup_options(lists=SETUP_LISTS)
def command(
    options: SetupOptions,
    assumed: AssumptionOptions,
    module: str | None,
    block: str | None,
    trace: Path | None,
    as_json: bool,
) -> int:
    """Run training steps through PyTorch's own FSDP code, as rank 0 of the world, on fake tensors.

    Needs torch but no GPU. Prints the peak of live bytes, its phase and its breakdown. If a GPU is named, also says
    whether the setup fits. Reserved memory is predicted for built-in models only.

    \b
    fsdp-bench dry-run --model Llama-3.1-8B --server p5.48xlarge --api fsdp2
    fsdp-bench dry-run --module mine:build --transformer-block mine:Block

    Exit codes: 0: fits, or unknown. 3: does not fit (of several: none fits). 2: bad input. 1: the dry run crashed.
    """
    readings = read_setups(options)
    specs, hardware, refused = _specs(options, readings, assumed.kernels, module, block, trace)
    places = [as_stated(one, assumed.gpu_memory, None, None) for one in hardware]
    kept = [stated_headroom(assumed.headroom, one) for one in places]
    runs, errors = [], []
    for spec, place, headroom, answer in zip(specs, places, kept, _answers(specs), strict=True):
        try:
            runs.append(DryRun(spec, result_of(answer), place, headroom))
        except DryRunError as error:  # the others still count
            errors.append(error)
    if not runs:
        raise DryRunError(f"the dry run failed: {errors[0]}")
    if as_json:
        documents = [dry_run_document(run) for run in runs]
        print_json({"dry_runs": documents} if len(readings) > 1 else documents[0])
    elif len(readings) > 1:
        reasons = [f"impossible: {one.setup.strategy.value}: {reason}" for one, reason in refused]
        print_text("\n".join([side_by_side(runs), *reasons]))
    else:
        print_text(report(runs[0]), COLOURS[runs[0].fits])
    for failure in errors:
        print_line(f"fsdp-bench: the dry run failed: {failure}", error=True)
    if errors:
        return ExitCode.CRASHED
    return ExitCode.DOES_NOT_FIT if all(run.fits is False for run in runs) else ExitCode.DONE


def _specs(
    options: SetupOptions,
    readings: Sequence[Reading],
    kernels: KernelSet,
    module: str | None,
    block: str | None,
    trace: Path | None,
) -> tuple[list[DryRunSpec], list[Hardware | None], list[tuple[Reading, str]]]:
    """Return the dry runs, the hardware of each, and the combinations that cannot run, each with its reason."""
    if module:
        _refuse_model(options)
    elif block is not None:
        raise SpecError("--transformer-block requires --module")
    if trace is not None and not trace.resolve().parent.is_dir():
        raise SpecError(f"trace: {str(trace.parent)!r} is no folder")
    shared: dict[str, Any] = {"kernels": kernels, "trace": str(trace.resolve()) if trace else None}
    specs, places, refused = [], [], []
    for one, subject in zip(readings, _subjects(options, readings, module, block), strict=True):
        model = subject.get("model")
        reason = why_impossible(model, one.setup, kernels) if model else impossible(one.setup, kernels)
        if reason is None:
            specs.append(DryRunSpec(setup=one.setup, **subject, **shared))
            places.append(one.hardware)
        else:
            refused.append((one, reason))
    if not specs:
        raise SpecError(refused[0][1])
    if trace is not None and len(specs) > 1:
        raise SpecError("--trace accepts one setup; several were given")
    if specs[0].model is not None:
        warn_of_sliding_window(options, max(spec.setup.sequence_length for spec in specs))
    return specs, places, refused


def _subjects(
    options: SetupOptions, readings: Sequence[Reading], module: str | None, block: str | None
) -> list[dict[str, Any]]:
    """Return what each dry run is of, as fields of its DryRunSpec: a user's module, a config.json or a model."""
    if module is not None:
        return [{"module": _module(reading.options, options, module, block)} for reading in readings]
    if (config := config_meant(options)) is not None:
        whose = "torchtitan" if read_code(options) == "torchtitan" else "huggingface"
        return [{"config": config, "lora": read_lora(options), "code": whose}] * len(readings)
    models = read_models(readings)
    if any(isinstance(model, RecordedModel) for model in models):
        raise SpecError(NEEDS_CODE)
    return [{"model": model} for model in models]


def _module(one: SetupOptions, given: SetupOptions, function: str, block: str | None) -> UserModule:
    """Read --module, and the sizes that the user gave, with the values of one combination of options."""
    arguments = {field: one.value(option) for field, option in SIZES.items() if given.is_given(option)}
    return UserModule(function=function, block=block, folder=os.getcwd(), arguments=arguments)


def _refuse_model(options: SetupOptions) -> None:
    given = [name for name in NOT_OF_A_MODULE if options.is_given(name)]
    if given == ["loss"]:
        raise SpecError("loss: --module's model computes its own loss; leave --loss out")
    if given:
        raise SpecError(f"--module and --{given[0].replace('_', '-')} each name a model; keep one")


def _answers(specs: Sequence[DryRunSpec]) -> list[DryRunAnswer]:
    """Run every spec in one of a few processes; return the answers in their order."""
    spec = specs[0]
    several = f", {len(specs)} setups" if len(specs) > 1 else ""
    line = f"running some steps of {spec.name} as rank 0 of {spec.setup.world_size}{several} ..."
    timer = threading.Timer(ANNOUNCED_AFTER_SECONDS, lambda: print_line(line, error=True))
    timer.daemon = True
    timer.start()
    try:
        answers = dict(dry_runs(specs, min(-(-len(specs) // 3), os.cpu_count() or 1)))
    finally:
        timer.cancel()
    return [answers[index] for index in range(len(specs))]
