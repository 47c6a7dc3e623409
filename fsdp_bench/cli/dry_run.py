"""``fsdp-bench dry-run``: PyTorch's own FSDP code on fake tensors, without GPUs."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fsdp_bench.cli.common.options import (
    SETUP_LISTS,
    SetupCommand,
    SetupOptions,
    headroom_option,
    setup_options,
)
from fsdp_bench.cli.common.setups import (
    config_meant,
    read_code,
    read_lora,
    read_models,
    read_setups,
    warn_of_sliding_window,
)
from fsdp_bench.plan.dry_run import DryRun, dry_run_document
from fsdp_bench.plan.headroom import sized, stated_headroom
from fsdp_bench.report.terminal import print_answer, print_line, print_lines
from fsdp_bench.report.text.dry_run import report, side_by_side
from fsdp_bench.simulate.wrappers.impossible import why_impossible
from fsdp_bench.spec.codec import to_json
from fsdp_bench.spec.errors import ExitCode, SpecError
from fsdp_bench.spec.hardware import Hardware
from fsdp_bench.spec.impossible import impossible
from fsdp_bench.spec.recording.model import Model, RecordedModel
from fsdp_bench.spec.setup import TrainSetup
from fsdp_bench.spec.subprocesses.dry_run import SIZES, DryRunSpec, KernelSet, UserModule
from fsdp_bench.sweep.dry_run import NEEDS_CODE, DryRunError, dry_runs, result_of
from fsdp_bench.sweep.module_names import check_names

ANNOUNCED_AFTER_SECONDS = 2.0
"""Seconds after which a progress line says on standard error that the dry run is running."""

NOT_OF_A_MODULE = ("model", "hf_config", "recorded", "code", "attention", "lora", "qlora", "params", "family", "loss")
"""Options that contradict --module: its function returns the model and the batch."""

Place = tuple[Hardware | None, int | None]
"""The hardware with its usable memory, and the bytes to keep free on each GPU."""


@click.command("dry-run", cls=SetupCommand)
@click.option(
    "--kernels",
    type=click.Choice(["cpu", "cuda"]),
    default="cuda",
    help="Simulate CUDA or CPU operators. Default: cuda.",
)
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
@click.option("--gpu-memory", metavar="24GiB", help="GPU memory that a process can use, instead of the catalogue's.")
@headroom_option
@click.option("--trace", type=click.Path(path_type=Path), help="Write every allocation and free into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@setup_options(lists=SETUP_LISTS)
def command(
    options: SetupOptions,
    kernels: KernelSet,
    module: str | None,
    block: str | None,
    gpu_memory: str | None,
    headroom: str | None,
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
    if module:
        _refuse_model(options)
    config = None if module else config_meant(options)
    is_built_in = module is None and config is None
    models: Sequence[Model | None] = read_models(readings) if is_built_in else [None] * len(readings)
    if any(isinstance(model, RecordedModel) for model in models):
        raise SpecError(NEEDS_CODE)
    setups = [reading.setup for reading in readings]
    reasons = [
        impossible(one, kernels) if model is None else why_impossible(model, one, kernels)
        for one, model in zip(setups, models, strict=True)
    ]
    can_run = [index for index, reason in enumerate(reasons) if reason is None]
    if not can_run:
        raise SpecError(reasons[0])
    if is_built_in:
        warn_of_sliding_window(options, max(setups[index].sequence_length for index in can_run))
    subject: dict[str, Any] = {}
    if config is not None:
        whose = "torchtitan" if read_code(options) == "torchtitan" else "huggingface"
        subject = {"config": config, "lora": read_lora(options), "code": whose}
    subjects = [
        {"module": _module(_as_given(readings[index].options, options), module, block)}
        if module
        else {"model": models[index], **subject}
        for index in can_run
    ]
    specs = _specs([setups[index] for index in can_run], kernels, subjects, block, trace)
    runs, errors = _run(specs, [_place(readings[index].hardware, gpu_memory, headroom) for index in can_run])
    refused = [
        f"impossible: {setup.strategy.value}: {reason}"
        for setup, reason in zip(setups, reasons, strict=True)
        if reason is not None
    ]
    _print(runs, len(setups) > 1, refused, as_json)
    if not runs:
        raise DryRunError(f"the dry run failed: {errors[0]}")
    for error in errors:
        print_line(f"fsdp-bench: the dry run failed: {error}", error=True)
    if errors:
        return ExitCode.CRASHED
    return ExitCode.DOES_NOT_FIT if all(run.fits is False for run in runs) else ExitCode.DONE


def _print(runs: Sequence[DryRun], are_several: bool, refused: Sequence[str], as_json: bool) -> None:
    if not runs:
        return
    if as_json:
        found = [dry_run_document(run) for run in runs]
        sys.stdout.write(to_json({"dry_runs": found} if are_several else found[0]).decode())
    elif are_several:
        first, *lines = side_by_side(runs).split("\n")
        print_answer(first, None)
        print_lines("\n".join([*lines, *refused]))
    else:
        answer_line, *lines = report(runs[0]).split("\n")
        print_answer(answer_line, {True: "green", False: "red", None: "yellow"}[runs[0].fits])
        print_lines("\n".join(lines))


def _place(hardware: Hardware | None, gpu_memory: str | None, headroom: str | None) -> Place:
    if gpu_memory is not None:
        hardware = sized(hardware, gpu_memory, None)
    return hardware, stated_headroom(headroom, hardware)


def _as_given(one: SetupOptions, given: SetupOptions) -> SetupOptions:
    """Return a combination of options without the sizes that the user did not give."""
    return one.with_values({size: one.value(size) if given.is_given(size) else None for size in SIZES.values()})


def _specs(
    setups: Sequence[TrainSetup],
    kernels: KernelSet,
    subjects: Sequence[Mapping[str, Any]],
    block: str | None,
    trace: Path | None,
) -> list[DryRunSpec]:
    if trace is not None and len(setups) > 1:
        raise SpecError("--trace accepts one setup; several were given")
    if trace is not None and not trace.resolve().parent.is_dir():
        raise SpecError(f"trace: {str(trace.parent)!r} is no folder")
    if "module" not in subjects[0] and block is not None:
        raise SpecError("--transformer-block requires --module")
    path = str(trace.resolve()) if trace else None
    return [
        DryRunSpec(setup=setup, kernels=kernels, trace=path, **subject)
        for setup, subject in zip(setups, subjects, strict=True)
    ]


def _refuse_model(options: SetupOptions) -> None:
    """Refuse options that --module would ignore.

    Raises:
        SpecError: naming the option.
    """
    given = [name for name in NOT_OF_A_MODULE if options.is_given(name)]
    if given == ["loss"]:
        raise SpecError("loss: --module's model computes its own loss; leave --loss out")
    if given:
        raise SpecError(f"--module and --{given[0].replace('_', '-')} each name a model; keep one")


def _module(options: SetupOptions, function: str, block: str | None) -> UserModule:
    """Read --module and its options."""
    given = {field: options.value(option) for field, option in SIZES.items()}
    arguments = {field: value for field, value in given.items() if value is not None}
    user = UserModule(function=function, block=block, folder=os.getcwd(), arguments=arguments)
    check_names(user)
    return user


def _run(specs: Sequence[DryRunSpec], places: Sequence[Place]) -> tuple[list[DryRun], list[DryRunError]]:
    """Run every spec, each with its hardware and the memory to keep free; if one crashes, the others still run.

    Raises:
        MachineError: when the dry run rejects the user's module or setup.
    """
    answers = {}
    with _announced(specs):
        for index, answer in dry_runs(specs, min(-(-len(specs) // 3), os.cpu_count() or 1)):
            answers[index] = answer
    runs, errors = [], []
    for index, spec in enumerate(specs):
        try:
            runs.append(DryRun(spec, result_of(answers[index]), *places[index]))
        except DryRunError as error:
            errors.append(error)
    return runs, errors


@contextmanager
def _announced(specs: Sequence[DryRunSpec]) -> Iterator[None]:
    """Print a progress line if the run takes over two seconds."""
    spec = specs[0]
    several = f", {len(specs)} setups" if len(specs) > 1 else ""
    line = f"running some steps of {spec.name} as rank 0 of {spec.setup.world_size}{several} ..."
    timer = threading.Timer(ANNOUNCED_AFTER_SECONDS, lambda: print_line(line, error=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
