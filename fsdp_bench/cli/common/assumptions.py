"""Options of a prediction beside the setup: kernels, memory, rates; predict and compare share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click

from fsdp_bench.cli.common.options import SetupOptions, calibration_option, headroom_option
from fsdp_bench.cli.common.setups import sliding_window_of, with_models
from fsdp_bench.plan.headroom import as_stated, stated_headroom
from fsdp_bench.plan.question import Question
from fsdp_bench.replay.host_memory import Build
from fsdp_bench.spec.calibration_profile import read_profile


@dataclass(frozen=True)
class AssumptionOptions:
    """The options as the user wrote them."""

    kernels: str
    load: str
    gpu_memory: str | None
    headroom: str | None
    calibration: Path | None
    expandable_segments: bool
    cuda: str | None


_OPTIONS = (
    click.option(
        "--kernels",
        default="cuda",
        show_default=True,
        type=click.Choice(["cuda", "cpu"]),
        help="Predict CUDA or CPU operators.",
    ),
    click.option(
        "--load",
        default=Build.META.value,
        show_default=True,
        type=click.Choice([build.value for build in Build]),
        help="Where parameters are initialized before sharding: on meta, on rank 0's host memory, or on every rank's.",
    ),
    click.option(
        "--gpu-memory", metavar="24GiB", help="GPU memory that a process can use, instead of the catalogue's."
    ),
    headroom_option,
    calibration_option,
    click.option("--expandable-segments", is_flag=True, help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."),
    click.option(
        "--cuda",
        metavar="12.1",
        help="Version of CUDA of the torch in use: cuBLAS multiplies more slowly before 12.5, where that is published,"
        " and torch takes FlashAttention-2 before 13.0. Default: a recent one.",
    ),
)


def assumption_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add these options to a command, which gets them as its argument ``assumed``."""

    @wraps(function)
    def call(**values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(AssumptionOptions)}
        return function(assumed=AssumptionOptions(**own), **values)

    decorated: Callable[..., Any] = call
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def read_questions(options: SetupOptions, assumed: AssumptionOptions) -> list[Question]:
    """Return a question for every combination of the options.

    Raises:
        SpecError: if an option is not allowed.
    """
    profile = read_profile(assumed.calibration) if assumed.calibration else None
    found = with_models(options)
    windows = {code: sliding_window_of(replace(options, code=code)) for code in {one.options.code for one, _ in found}}
    questions = []
    for (one, setup, hardware), model in found:
        hardware = as_stated(hardware, assumed.gpu_memory, profile, assumed.cuda)
        kept = stated_headroom(assumed.headroom, hardware)
        build, segments = Build(assumed.load), assumed.expandable_segments
        questions.append(
            Question(model, setup, hardware, assumed.kernels, build, segments, profile, kept, windows[one.code])
        )
    return questions
